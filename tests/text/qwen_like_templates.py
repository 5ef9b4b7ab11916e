"""Chat templates that use what Qwen's published ones use, written for the tests."""

# Tool calls as JSON, thinking of earlier turns taken out (the Qwen3 manner).
JSON_CALLS = r"""
{#- Written for the tests. -#}
{%- set first = messages[0] if messages else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if first.role == 'system' %}
        {{- first.content + '\n\n' }}
    {%- endif %}
    {{- "# Functions\n\nSignatures:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nAnswer with {\"name\": ..., \"arguments\": ...}<|im_end|>\n" }}
{%- elif first.role == 'system' %}
    {{- '<|im_start|>system\n' + first.content + '<|im_end|>\n' }}
{%- endif %}
{%- set state = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set place = (messages|length - 1) - loop.index0 %}
    {%- if state.searching and message.role == "user" and message.content is string
          and not (message.content.startswith('<tool_response>')
                   and message.content.endswith('</tool_response>')) %}
        {%- set state.searching = false %}
        {%- set state.last_query = place %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n') %}
            {%- set thoughts = thoughts.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.last_query and (loop.last or thoughts) %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}
            {{- content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# Tool calls as tags, content in parts, a macro, refusals (the Qwen3.5 manner).
TAGGED_CALLS = r"""
{%- set pictures = namespace(count=0) %}
{%- macro flat(content, counting, is_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image_url' in part %}
                {%- if is_system %}
                    {{- raise_exception('A system message is text only.') }}
                {%- endif %}
                {%- if counting %}
                    {%- set pictures.count = pictures.count + 1 %}
                {%- endif %}
                {%- if add_vision_id %}
                    {{- 'Picture ' ~ pictures.count ~ ': ' }}
                {%- endif %}
                {{- '<|image|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('Unknown part: ' ~ part.type) }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Content must be text or parts.') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('There is no message.') }}{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>' }}
    {%- if messages[0].role == 'system' %}
        {%- set head = flat(messages[0].content, false, true) | trim %}
        {%- if head %}{{- '\n\n' + head }}{%- endif %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + flat(messages[0].content, false, true) | trim }}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = flat(message.content, true) | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('The system message comes first.') }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content is string and loop.last %}
            {{- '<think>\n' + message.reasoning_content | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls and message.tool_calls is not mapping %}
            {%- for call in message.tool_calls %}
                {%- if call.function is defined %}
                    {%- set call = call.function %}
                {%- endif %}
                {{- '\n\n' if loop.first and content else '\n' if not loop.first }}
                {{- '<tool_call>\n<function=' + call.name + '>\n' }}
                {%- for name, value in call.arguments | items %}
                    {%- set value = value | tojson | safe if value is mapping
                        or (value is sequence and value is not string)
                        else value | string %}
                    {{- '<parameter=' + name + '>\n' }}
                    {{- value }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}
                {{- '</function>\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unknown role: ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}
{%- endif %}
"""

# Block tags on lines of their own, loop control, filters, slices, named tokens.
PLAIN = """\
{{ bos_token }}{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 3 %}
        {% break %}
    {% endif %}
<|{{ message['role'] | upper }}|> {{ message.content | replace('\\t', ' ') }}
    {# a comment #}
{%- generation %}
{{ message.get('note', 'no note') }}{% endgeneration %}

{% endfor %}
{{ messages | map(attribute='role') | join(', ') }} {{ messages[1:] | length }}
{% set pairs = dict(a=1, b=[1, none, true]) %}
{% for key, value in pairs.items() %}{{ key }}={{ value }} {% endfor %}
{{ pairs | tojson(indent=2) }} {{ 7 // 2 }} {{ 1.5 }} {{ 'x' * 3 }} {{ eos_token }}
"""
