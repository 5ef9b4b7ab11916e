"""Drafters: five ways to guess the next tokens, behind one protocol."""
