from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from localfast.core import Message
from localfast.errors import TemplateFailed
from localfast.models.meter import Limits
from localfast.models.template import ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' }}"
    "{%- generation %}{{- message.content | trim ~ '<|eot_id|>' }}{%- endgeneration %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' + message['content'] | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}"
    "{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message.role == 'user' %}{%- if loop.last and system is defined %}{{- '[INST]' + system + '\n\n' + message.content }}"
    "{%- else %}{{- '[INST]' + message.content }}{%- endif %}{{- '[/INST]' }}{%- else %}{{- message.content + eos_token }}"
    "{%- endif %}{%- endfor %}"
)
DROPS_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }}={{ m.content }};{% endif %}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}{% endfor %}"
)


def chat(*turns: str) -> list[Message]:
    """Turns written as 's:text', 'u:text', 'a:text' or 'd:text'."""
    roles = {"s": "system", "u": "user", "a": "assistant", "d": "developer", "t": "tool"}
    return [Message(roles[turn[0]], turn[2:]) for turn in turns]


def template(source: str | None, *tokens: str, limits: Limits | None = None) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", frozenset(tokens), limits)


def refusal(source: str, limits: Limits | None = None) -> str:
    with pytest.raises(TemplateFailed) as caught:
        template(source, limits=limits).render(chat("u:hi"))
    return caught.value.reason


@pytest.mark.parametrize(
    ("source", "turns", "expected"),
    [
        (
            CHATML,
            chat("s:Be brief.", "u:Hi"),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (CHATML, chat("d:Be brief."), "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA3,
            chat("u: Hi "),
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (GEMMA, chat("u:Hi"), "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
        (GEMMA, chat("s:S", "u:Hi"), "<s><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\n"),
        (GEMMA, chat("s:S"), "<s><start_of_turn>user\nS<end_of_turn>\n<start_of_turn>model\n"),
        (MISTRAL, chat("s:S", "u:1", "a:2", "u:3"), "<s>[INST]1[/INST]2</s>[INST]S\n\n3[/INST]"),
        (MISTRAL, chat("u:1", "u:2", "a:3", "s:4", "u:5"), "<s>[INST]1\n\n2[/INST]3</s>[INST]4\n\n5[/INST]"),
        (MISTRAL, chat("s:A", "s:B", "u:1"), "<s>[INST]A\n\nB\n\n1[/INST]"),
        (MISTRAL, chat("a:Welcome", "u:1"), "<s>[INST][/INST]Welcome</s>[INST]1[/INST]"),
        (MISTRAL, chat("u:1", "a:2", "t:3"), "<s>[INST]1[/INST]2</s>[INST]3[/INST]"),
    ],
)
def test_template_renders_what_the_model_was_trained_on(source: str, turns: list[Message], expected: str) -> None:
    assert template(source).render(turns) == expected


def test_template_that_drops_a_late_system_message_gets_it_as_the_users() -> None:
    assert template(DROPS_LATE_SYSTEM).render(chat("s:A", "u:1", "a:2", "s:B")) == "system=A;user=1;assistant=2;user=B;"


def test_template_that_takes_messages_as_they_are_is_not_given_others() -> None:
    assert (
        template("{{ messages | map(attribute='role') | join(' ') }}{{ messages | tojson }}")
        .render(chat("s:<A>", "u:é", "u:2", "s:B"))
        .startswith('system user user system[{"role": "system", "content": "<A>"}, {"role": "user", "content": "é"}')
    )


def test_template_that_reads_only_typed_parts_gets_them() -> None:
    assert template(PARTS_ONLY).render(chat("u:Hi", "a:Ho", "u:He")) == "[Hi][Ho][He]"


@pytest.mark.parametrize("text", ["The answer is", "ends with spaces  \n", "", "\ue000prefill\ue001"])
@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA, MISTRAL, PARTS_ONLY, None])
def test_template_last_assistant_message_is_left_open(source: str | None, text: str) -> None:
    render = template(source, "<|im_start|>").render
    begun, answered = render(chat("u:Hi")), render([*chat("u:Hi"), Message("assistant", text)])
    assert answered == (begun[:-4] + "[Hi][" if source == PARTS_ONLY else begun) + text


def test_template_that_wants_the_users_last_word_is_still_continued() -> None:
    strict = "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}Q{{ messages[-1].content }}A"
    assert template(strict).render(chat("u:1", "a:2")) == "Q1A2"


def test_template_refusal_carries_the_templates_own_words() -> None:
    assert refusal("{{ raise_exception('Only Latin, please') }}") == "Only Latin, please"
    assert "oops" in refusal("{{ messages[0].content.oops.deeper }}")
    assert "does not compile: Expected an expression" in refusal("{% if %}")
    with pytest.raises(TemplateFailed, match="no messages"):
        template(CHATML).render([])


def test_template_missing_falls_back_to_a_form_the_vocabulary_knows() -> None:
    chatml, plain = template(" ", "<|im_start|>"), ChatTemplate(None, "", "", lambda token: False)
    assert (chatml.kind, plain.kind, template(CHATML).kind) == ("chatml", "plain", "model")
    assert (chatml.stops, plain.stops, template(CHATML).stops) == (("<|im_end|>",), ("\nUser:",), ())
    turns = chat("s:Be brief.", "u:Hi", "a: Ho", "u:He ")
    assert plain.render(turns) == "Be brief.\nUser: Hi\nAssistant:  Ho\nUser: He \nAssistant:"
    assert chatml.render(turns[:2]) == template(CHATML).render(turns[:2])


def test_template_offers_what_transformers_offers() -> None:
    source = (
        "{%- for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}\n"
        "{{ strftime_now('%Y') }} {{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }} {{ [1] | tojson(indent=2) }}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content.split(',') | length %}{% endfor %}"
        "{{ ns.n }}{{ tools is none and documents is none }} {{ '%s-%03d' | format('x', 7) }} {{ '{}{:>3}'.format(1, 2) }} "
        "{{ 'a-b'.replace('-', '+') }}"
        "{%- macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }} "
        "{{ (1, 2) | sum }} {{ 'x\ny' | indent(2) }} {{ [3, 1] | sort | join('<') }}"
    )
    year = datetime.now().year
    expected = f'02{year} {{"a": "<é>", "b": 1}} [\n  1\n]2True x-007 1  2 a+babab 3 x\n  y 1<3'
    assert template(source).render(chat("u:a,b")) == expected


FAST = Limits(time_s=0.05)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if a in range(99999) | list and false %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set big = range(99999) | list %}{{ big | reject('in', big) | list }}",
    ],
)
def test_template_that_runs_on_is_stopped(source: str) -> None:
    assert "ran longer than 0.05 s" in refusal(source, FAST)


HUGE = [
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ (10**4) * 'a' * (10**6) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x={}) %}{% for i in range(9999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = ns.x + ['a' * 999999] %}{% endfor %}",
    "{% set s='a' * 999999 %}{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = ns.x + [s[1:]] %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ ('%s' * 9999) % ('a' * 9999999) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "{{ ('{:>1000000000}' | attr('format'))(1) }}",
    "{{ ['%1000000000d'] | map('format', 1) | list }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(1000000000) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ '1'.zfill(1000000000) }}",
    "{{ '\t'.expandtabs(1000000000) }}",
    "{{ 'a'.translate({97: 'b' * 9999999}) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | center(width=10**9) }}",
    "{{ ['a'] | map('center', 1000000000) | list }}",
    "{{ ('a\n' * 9999) | indent(99999) }}",
    "{{ ('a\n' * 9999) | indent('b' * 99999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "{{ range(99999) | join('b' * 99999) }}",
    "{{ ('b' * 99999).join('a' * 99999) }}",
    "{{ range(99999) | map('string') | map('center', 99999) | list }}",
    "{{ [[1]] | tojson(indent='a' * 99999) }}",
    "{{ [1, 2] | batch(1000000000, 0) | list }}",
    "{{ [1, 2] | slice(1000000000) | list }}",
    "{{ ('a,' * 4999999).split(',') }}",
    "{{ ('a' * 9999999) | list }}",
    "{{ [range(9999) | list] * 999 | sum(start=[]) }}",
    "{% set x %}{% for i in range(9999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "{{ strftime_now('%c' * 99999) }}",
    "{{ range(10**9) | list }}",
    "{{ lipsum(n=1000000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ 1" + " + 1" * 3000 + " }}",
    "a" * 2**19,
]


@pytest.mark.parametrize("source", HUGE)
def test_template_that_grows_is_refused_before_it_takes_memory(source: str) -> None:
    tracemalloc.start()
    try:
        assert refusal(source)
        assert tracemalloc.get_traced_memory()[1] < 2**29
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (''|attr('__class__')).__base__ }}",
        "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | first | first }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ range.__globals__ }}{{ namespace.__init__.__globals__.os.system('true') }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.environment.x }}",
        "{{ '{0.__class__.__mro__[1]}'.format(1) }}",
        "{{ '{x.__class__.__mro__[1]}'.format_map({'x': 1}) }}",
        "{{ ['{0.__class__.__base__}'.format][0](1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].__setitem__('role', 'x') }}",
        "{{ (1).to_bytes(1000000000) }}",
        "{{ 'a'.encode() }}",
        "{% autoescape true %}{{ '<' }}{% endautoescape %}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}",
    ],
)
def test_template_cannot_leave_the_sandbox(source: str) -> None:
    assert refusal(source)


def test_template_limit_names_itself_and_is_not_tried_again() -> None:
    assert "stopped: it wrote more than 10 characters" in refusal("{{ 'a' * 11 }}", Limits(output_chars=10))
    assert "16777216 characters" in refusal("{{ 'a' * 10**9 }}")


def test_template_long_chat_stays_within_the_limits() -> None:
    turns = [Message("user" if index % 2 == 0 else "assistant", "word " * 1000) for index in range(799)]
    collect = (
        "{% set ns = namespace(x=[]) %}{% for m in messages %}{% set ns.x = ns.x + [m] %}{% endfor %}{% set messages = ns.x %}"
    )
    for source in (CHATML, LLAMA3, GEMMA, MISTRAL, collect + CHATML):
        assert template(source, limits=Limits(time_s=60)).render(turns).count("word") == 799_000


def test_template_renders_in_many_threads_at_once() -> None:
    shared = template(LLAMA3)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda index: shared.render(chat(f"u:{index}")), range(64)))
    assert texts == [template(LLAMA3).render(chat(f"u:{index}")) for index in range(64)]
