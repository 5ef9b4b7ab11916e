"""Gated delta rule: every implementation against a row-by-row float64 oracle."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from kernels import tolerances
from pallas_kernels import gated_delta
from pallas_kernels.gated_delta import shapes

IMPLEMENTATIONS = ("reference", "xla")
VERIFY = {
    name: jax.jit(functools.partial(gated_delta.verify, implementation=name))
    for name in IMPLEMENTATIONS
}
FOLD = {
    name: jax.jit(functools.partial(gated_delta.fold, implementation=name))
    for name in IMPLEMENTATIONS
}
PREFILL = {
    name: jax.jit(
        functools.partial(gated_delta.prefill, implementation=name),
        static_argnames="chunk_size",
    )
    for name in IMPLEMENTATIONS
}
LOG_TINY = np.log(1e-12)
# Sizes, slots and rows of the programs that most tests share.
CASES = (
    ("tiny_group_1", 1, 1),
    ("tiny_group_2", 5, 3),
    ("tiny_group_3", 5, 5),
    ("tiny_group_2", 1, 16),
)

each_implementation = pytest.mark.parametrize("name", IMPLEMENTATIONS)
each_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0]}-{c[1]}x{c[2]}"
)


def run_rows(state, queries, keys, values, log_decays, betas):
    """Oracle of one slot: outputs and deltas [K, Hv, Dv], and the state, float64."""
    state = np.array(state, np.float64)
    outputs, deltas = [], []
    for q, k, v, g, beta in zip(queries, keys, values, log_decays, betas, strict=True):
        group_size = len(v) // len(k)
        delta = np.zeros(v.shape)
        output = np.zeros(v.shape)
        for h in range(len(v)):
            key = k[h // group_size].astype(np.float64)
            query = q[h // group_size].astype(np.float64)
            decayed = np.exp(np.float64(g[h])) * state[h]
            delta[h] = beta[h] * (v[h] - decayed.T @ key)
            state[h] = decayed + np.outer(key, delta[h])
            output[h] = state[h].T @ query
        outputs.append(output)
        deltas.append(delta)
    shape = (0, *state.shape[::2])
    return (
        np.array(outputs).reshape(-1, *shape[1:]),
        np.array(deltas).reshape(-1, *shape[1:]),
        state,
    )


def fold_rows(state, records):
    """Oracle of one slot's fold of all rows of `records`, float64."""
    state = np.array(state, np.float64)
    for key, delta, log_decay in zip(*records, strict=True):
        group_size = len(delta) // len(key)
        for h in range(len(delta)):
            outer = np.outer(key[h // group_size], delta[h].astype(np.float64))
            state[h] = np.exp(np.float64(log_decay[h])) * state[h] + outer
    return state


def make_rows(sizes, batch, num_rows, seed=0):
    """Rows as a model gives them, with gates at their extremes and zero vectors."""
    rng = np.random.default_rng(seed)
    shape = (batch, num_rows, sizes.num_key_heads, sizes.key_dim)
    queries, keys = rng.normal(size=(2, *shape))
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True) * sizes.key_dim**0.5
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    values = rng.normal(size=(batch, num_rows, sizes.num_value_heads, sizes.value_dim))
    log_decays = -np.exp(rng.uniform(np.log(1e-4), 0, size=values.shape[:3]))
    betas = rng.uniform(size=values.shape[:3])
    log_decays[rng.uniform(size=betas.shape) < 0.1] = LOG_TINY
    log_decays[rng.uniform(size=betas.shape) < 0.1] = 0
    betas[rng.uniform(size=betas.shape) < 0.15] = 0
    betas[rng.uniform(size=betas.shape) < 0.15] = 1
    keys[rng.uniform(size=shape[:3]) < 0.1] = 0
    queries[rng.uniform(size=shape[:3]) < 0.1] = 0
    rows = (queries, keys, values, log_decays, betas)
    return tuple(x.astype(np.float32) for x in rows)


def make_state(sizes, batch, seed=1):
    shape = (batch, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_pending(sizes, batch, num_rows, seed=2):
    _, keys, deltas, log_decays, _ = make_rows(sizes, batch, num_rows, seed)
    return gated_delta.Records(keys, deltas, log_decays)


def poison(rows, lengths):
    """Sets every row at or past its slot's length to NaN."""

    def poisoned(x):
        x = np.array(x)
        for slot, length in enumerate(lengths):
            x[slot, length:] = np.nan
        return x

    return jax.tree.map(poisoned, rows)


def slot(tree, index):
    return jax.tree.map(lambda x: np.asarray(x)[index], tree)


def take_rows(tree, start, stop):
    return jax.tree.map(lambda x: x[:, start:stop], tree)


def check_verify(name, sizes, batch, num_rows, num_pending, seed=0):
    state = make_state(sizes, batch, seed + 1)
    pending = poison(make_pending(sizes, batch, num_rows, seed + 2), num_pending)
    rows = make_rows(sizes, batch, num_rows, seed)
    result = VERIFY[name](state, pending, np.int32(num_pending), *rows)
    folded, outputs, deltas = [], [], []
    for i, count in enumerate(num_pending):
        records = jax.tree.map(lambda x, i=i, count=count: x[i, :count], pending)
        folded.append(fold_rows(state[i], records))
        output, delta, _ = run_rows(folded[-1], *slot(rows, i))
        outputs.append(output)
        deltas.append(delta)
    num_terms = sizes.key_dim + num_rows
    check = functools.partial(tolerances.assert_close, num_terms=num_terms)
    check(result.state, np.array(folded), name="state")
    check(result.outputs, np.array(outputs), name="outputs")
    check(result.records.deltas, np.array(deltas), name="deltas")
    tolerances.assert_same_bits(result.records.keys, rows[1])
    tolerances.assert_same_bits(result.records.log_decays, rows[3])


@each_implementation
@each_case
def test_verify_and_its_records_match_the_recurrence(name, case) -> None:
    size_name, batch, num_rows = case
    for shift in (0, num_rows):
        # All counts from none to all rows over the slots; a lone slot sees both ends.
        num_pending = [(i + shift) % (num_rows + 1) for i in range(batch)]
        check_verify(name, shapes.TINY[size_name], batch, num_rows, num_pending)


@each_implementation
@pytest.mark.parametrize(
    ("sizes", "num_rows"),
    [
        (shapes.Sizes(1, 3, 80, 96), 9),
        (shapes.Sizes(2, 2, 64, 128), 5),
        (shapes.Sizes(1, 2, 256, 80), 3),
    ],
    ids=["80x96", "64x128", "256x80"],
)
def test_verify_at_other_head_dimensions(name, sizes, num_rows) -> None:
    check_verify(name, sizes, 2, num_rows, [num_rows, 1])


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.tuples(*[st.integers(0, 3)] * 5), st.integers(0, 1000))
def test_verify_for_drawn_counts_and_rows(num_pending, seed) -> None:
    check_verify("xla", shapes.TINY["tiny_group_2"], 5, 3, list(num_pending), seed)


@pytest.mark.smoke
@each_implementation
def test_verify_one_row_is_a_decode_step(name) -> None:
    check_verify(name, shapes.TINY["tiny_group_1"], 1, 1, [1])


@each_implementation
@pytest.mark.parametrize("case", CASES[1:3], ids=lambda case: case[0])
def test_fold_ignores_rows_past_its_count(name, case) -> None:
    size_name, batch, num_rows = case
    sizes = shapes.TINY[size_name]
    state = make_state(sizes, batch)
    for shift in range(num_rows + 1):
        num_pending = [(i + shift) % (num_rows + 1) for i in range(batch)]
        pending = poison(make_pending(sizes, batch, num_rows), num_pending)
        folded = np.asarray(FOLD[name](state, pending, np.int32(num_pending)))
        expected = [
            fold_rows(state[i], jax.tree.map(lambda x, i=i, n=n: x[i, :n], pending))
            for i, n in enumerate(num_pending)
        ]
        tolerances.assert_close(folded, np.array(expected), num_terms=num_rows)
        for i in np.flatnonzero(np.array(num_pending) == 0):
            tolerances.assert_same_bits(folded[i], state[i])


@each_implementation
def test_zero_vectors_and_gates_give_zeros(name) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    rows = make_rows(sizes, 5, 3)
    queries, keys, values, log_decays, betas = (np.zeros_like(x) for x in rows)
    pending = gated_delta.Records(keys, values, log_decays)
    state = make_state(sizes, 5)
    result = VERIFY[name](
        state, pending, np.int32([3] * 5), queries, keys, values, log_decays, betas
    )
    assert not np.any(result.outputs)
    assert not np.any(result.records.deltas)
    np.testing.assert_array_equal(result.state, state)


@each_implementation
def test_every_row_at_the_smallest_decay(name) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    rows = list(make_rows(sizes, 2, 65))
    rows[3] = np.full_like(rows[3], LOG_TINY)
    check_prefill(name, sizes, rows, [65, 40], chunk_size=64)


@each_implementation
def test_slots_are_isolated_bit_for_bit(name) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    state = make_state(sizes, 5)
    pending = make_pending(sizes, 5, 3)
    rows = make_rows(sizes, 5, 3)
    alone = VERIFY[name](state, pending, np.int32([0, 0, 1, 0, 0]), *rows)

    def ruin_others(x):
        x = np.array(x)
        x[[0, 1, 3, 4]] = np.nan
        return x

    args = jax.tree.map(ruin_others, (state, pending, *rows))
    beside = VERIFY[name](*args[:2], np.int32([3, 2, 1, 3, 0]), *args[2:])
    tolerances.assert_same_bits(slot(beside, 2), slot(alone, 2))


def check_prefill(name, sizes, rows, lengths, chunk_size):
    batch, num_rows = rows[0].shape[:2]
    state = make_state(sizes, batch)
    outputs, new_state = PREFILL[name](
        state, *poison(tuple(rows), lengths), np.int32(lengths), chunk_size=chunk_size
    )
    outputs, new_state = jax.device_get((outputs, new_state))
    for i, length in enumerate(lengths):
        live = (x[i, :length] for x in rows)
        expected, _, expected_state = run_rows(state[i], *live)
        check = functools.partial(
            tolerances.assert_close, num_terms=sizes.key_dim + num_rows
        )
        check(outputs[i, :length], expected, name=f"outputs of slot {i}")
        check(new_state[i], expected_state, name=f"state of slot {i}")
        assert not np.any(outputs[i, length:])
        if length == 0:
            tolerances.assert_same_bits(new_state[i], state[i])


@pytest.mark.parametrize("num_rows", [65, 130])
@pytest.mark.parametrize(
    ("name", "chunk_size"),
    [("reference", 64), ("xla", 16), ("xla", 32), ("xla", 64)],
)
def test_prefill_of_any_chunk_size_matches_the_recurrence(
    name, chunk_size, num_rows
) -> None:
    sizes = shapes.TINY["tiny_group_3"]
    rows = make_rows(sizes, 5, num_rows)
    lengths = [0, 1, num_rows, 64, 17]
    check_prefill(name, sizes, rows, lengths, chunk_size)


def prefill_in_parts(name, sizes, rows, parts):
    """Runs rows in calls of up to 19 rows each, from a state that is not zero."""
    state = make_state(sizes, 1)
    outputs, start = [], 0
    for part in parts:
        padded = jax.tree.map(
            lambda x, start=start, part=part: np.concatenate(
                [x[:, start : start + part], np.full_like(x[:, : 19 - part], np.nan)],
                axis=1,
            ),
            rows,
        )
        output, state = PREFILL[name](state, *padded, np.int32([part]), chunk_size=64)
        outputs.append(np.asarray(output)[:, :part])
        start += part
    return np.concatenate(outputs, axis=1), np.asarray(state)


def check_split(name, sizes, num_rows, parts):
    rows = make_rows(sizes, 1, num_rows)
    outputs, state = prefill_in_parts(name, sizes, rows, parts)
    expected, _, expected_state = run_rows(make_state(sizes, 1)[0], *slot(rows, 0))
    num_terms = sizes.key_dim + num_rows
    tolerances.assert_close(outputs[0], expected, num_terms=num_terms)
    tolerances.assert_close(state[0], expected_state, num_terms=num_terms)


@each_implementation
@pytest.mark.parametrize(
    "parts",
    [(12,), (6, 6), (1, 11), (3, 1, 8), (19,), (7, 1, 4, 2, 5), (1,) * 19],
    ids=lambda parts: "+".join(map(str, parts)),
)
def test_prefill_agrees_for_every_split(name, parts) -> None:
    check_split(name, shapes.TINY["tiny_group_2"], sum(parts), parts)


@hypothesis.settings(max_examples=10)
@hypothesis.given(
    parts=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    size_name=st.sampled_from(sorted(shapes.TINY)),
)
def test_prefill_agrees_for_drawn_splits(parts, size_name) -> None:
    check_split("xla", shapes.TINY[size_name], sum(parts), parts)


@each_implementation
def test_state_stays_near_float64_over_512_verify_steps(name) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    batch, num_rows, num_steps = 5, 3, 512
    rng = np.random.default_rng(3)
    state = make_state(sizes, batch)
    exact = state.astype(np.float64)
    pending = poison(make_pending(sizes, batch, num_rows), [0] * batch)
    accepted = np.zeros(batch, np.int32)
    errors = []
    for step in range(num_steps):
        rows = make_rows(sizes, batch, num_rows, seed=1000 + step)
        result = VERIFY[name](state, pending, accepted, *rows)
        errors.append(state_error(result.state, exact))
        accepted = rng.integers(0, num_rows + 1, size=batch, dtype=np.int32)
        for i, count in enumerate(accepted):
            _, _, exact[i] = run_rows(exact[i], *(x[i, :count] for x in rows))
        state, pending = result.state, poison(result.records, accepted)
    assert max(errors) <= 5e-6
    # The error follows the decay, not the number of steps.
    assert max(errors[num_steps // 2 :]) <= 4 * max(errors[: num_steps // 2])


def state_error(state, exact) -> float:
    """Largest relative error of a head's state, in the Frobenius norm."""
    difference = np.linalg.norm(np.asarray(state, np.float64) - exact, axis=(2, 3))
    return np.max(difference / np.linalg.norm(exact, axis=(2, 3)))


@pytest.mark.parametrize("case", CASES[1:], ids=lambda c: f"{c[0]}-{c[1]}x{c[2]}")
def test_strict_fold_of_rows_together_and_one_by_one_has_one_result(case) -> None:
    size_name, batch, num_rows = case
    sizes = shapes.TINY[size_name]
    state = make_state(sizes, batch)
    pending = make_pending(sizes, batch, num_rows)
    together = FOLD["reference"](state, pending, np.full(batch, num_rows, np.int32))
    for index in range(num_rows):
        record = take_rows(pending, index, index + 1)
        state = FOLD["reference"](state, record, np.ones(batch, np.int32))
    tolerances.assert_same_bits(state, together)


@pytest.mark.parametrize("case", CASES[1:], ids=lambda c: f"{c[0]}-{c[1]}x{c[2]}")
def test_strict_verify_of_rows_together_and_one_by_one_has_one_result(case) -> None:
    size_name, batch, num_rows = case
    sizes = shapes.TINY[size_name]
    state = make_state(sizes, batch)
    pending = make_pending(sizes, batch, num_rows)
    num_pending = np.array([(i + 1) % (num_rows + 1) for i in range(batch)], np.int32)
    rows = make_rows(sizes, batch, num_rows)
    together = VERIFY["reference"](state, pending, num_pending, *rows)
    together = jax.device_get(together)
    final = FOLD["reference"](
        together.state, together.records, np.full(batch, num_rows, np.int32)
    )
    # Single rows: each call folds the record of the one before.
    state = FOLD["reference"](state, pending, num_pending)
    tolerances.assert_same_bits(together.state, state)
    record = poison(take_rows(pending, 0, 1), [0] * batch)
    accepted = np.zeros(batch, np.int32)
    for index in range(num_rows):
        row = take_rows(rows, index, index + 1)
        alone = jax.device_get(VERIFY["reference"](state, record, accepted, *row))
        tolerances.assert_same_bits(alone.outputs[:, 0], together.outputs[:, index])
        tolerances.assert_same_bits(
            alone.records.deltas[:, 0], together.records.deltas[:, index]
        )
        state, record = alone.state, alone.records
        accepted = np.ones(batch, np.int32)
    state = FOLD["reference"](state, record, accepted)
    tolerances.assert_same_bits(state, final)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_donated_state_is_updated_in_place(num_rows) -> None:
    sizes = shapes.Sizes(2, 4, 128, 128)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        (
            make_state(sizes, 1),
            make_pending(sizes, 1, num_rows),
            np.zeros(1, np.int32),
            *make_rows(sizes, 1, num_rows),
        ),
    )
    verify = functools.partial(gated_delta.verify, implementation="xla")
    compiled = jax.jit(verify, donate_argnums=0).lower(*abstract).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == sizes.state_bytes
    # No second state beside it; rows and their products are a fraction of one.
    assert memory.temp_size_in_bytes < sizes.state_bytes


def test_prefill_has_the_gradient_of_the_recurrence() -> None:
    sizes = shapes.TINY["tiny_group_2"]
    state, rows = make_state(sizes, 2), make_rows(sizes, 2, 21)
    # Rows past a length must not reach the gradient either.
    rows, lengths = poison(rows, [21, 10]), np.int32([21, 10])

    def loss(state, rows):
        outputs, state = gated_delta.prefill(
            state, *rows, lengths, chunk_size=16, implementation="xla"
        )
        return jnp.sum(outputs**2) + jnp.sum(state**2)

    def step(state, row):
        q, k, v, g, beta = row
        q, k = (jnp.repeat(x, sizes.group_size, axis=0) for x in (q, k))
        state = jnp.exp(g)[:, None, None] * state
        delta = beta[:, None] * (v - jnp.einsum("hkv,hk->hv", state, k))
        state += jnp.einsum("hk,hv->hkv", k, delta)
        return state, jnp.einsum("hkv,hk->hv", state, q)

    def recurrence_loss(state, rows):
        total = 0.0
        for index, length in enumerate(lengths):
            live = jax.tree.map(lambda x, i=index, n=length: x[i, :n], rows)
            last, outputs = jax.lax.scan(step, state[index], live)
            total += jnp.sum(outputs**2) + jnp.sum(last**2)
        return total

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, rows)
    expected = jax.jit(jax.grad(recurrence_loss, argnums=(0, 1)))(state, rows)
    for actual, wanted in zip(
        *map(jax.tree.leaves, (gradients, expected)), strict=True
    ):
        num_terms = 21 * sizes.key_dim * sizes.value_dim
        tolerances.assert_close(
            actual, np.asarray(wanted, np.float64), num_terms=num_terms
        )


def test_sizes_of_models_fit_the_op() -> None:
    for sizes in shapes.MODELS.values():
        rows = jax.eval_shape(lambda sizes=sizes: make_abstract_rows(sizes))
        state = jax.ShapeDtypeStruct(
            (2, sizes.num_value_heads, sizes.key_dim, sizes.value_dim), jnp.float32
        )
        pending = gated_delta.Records(rows[1], rows[2], rows[3])
        count = jax.ShapeDtypeStruct((2,), jnp.int32)
        result = jax.eval_shape(gated_delta.verify, state, pending, count, *rows)
        assert result.state == state
        assert result.outputs.shape == rows[2].shape
        assert sizes.state_bytes == 4 * result.state.size // 2


def make_abstract_rows(sizes):
    keys = jnp.zeros((2, 4, sizes.num_key_heads, sizes.key_dim))
    values = jnp.zeros((2, 4, sizes.num_value_heads, sizes.value_dim))
    gates = jnp.zeros(values.shape[:3])
    return keys, keys, values, gates, gates


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"state": a["state"].swapaxes(2, 3)}, r"`pending.keys` must have"),
        (lambda a: {"state": a["state"].astype(jnp.bfloat16)}, r"`state` must be flo"),
        (lambda a: {"keys": a["keys"].astype(jnp.bfloat16)}, r"`keys` must be float32"),
        (lambda a: {"betas": a["betas"][:, :2]}, r"`betas` must have shape"),
        (lambda a: {"num_pending": np.float32([0])}, r"`num_pending` must be integer"),
    ],
    ids=["transposed state", "16-bit state", "16-bit keys", "rows", "count"],
)
def test_mismatch_is_refused_by_name(change, message) -> None:
    sizes = shapes.TINY["tiny_group_2"]
    names = ("queries", "keys", "values", "log_decays", "betas")
    args = dict(zip(names, make_rows(sizes, 1, 3), strict=True))
    args |= {
        "state": make_state(sizes, 1),
        "pending": make_pending(sizes, 1, 3),
        "num_pending": np.int32([0]),
    }
    with pytest.raises(ValueError, match=message):
        gated_delta.verify(**(args | change(args)))


def test_head_groups_must_divide() -> None:
    wide = make_rows(shapes.Sizes(2, 3, 8, 12), 1, 3)
    state = make_state(shapes.Sizes(2, 3, 8, 12), 1)
    with pytest.raises(ValueError, match="axis Hv must be a multiple of axis Hk"):
        gated_delta.prefill(state, *wide, np.int32([3]))


def test_chunk_size_must_be_positive() -> None:
    sizes = shapes.TINY["tiny_group_2"]
    with pytest.raises(ValueError, match="`chunk_size` must be positive, got 0"):
        gated_delta.prefill(
            make_state(sizes, 1), *make_rows(sizes, 1, 3), np.int32([3]), chunk_size=0
        )
