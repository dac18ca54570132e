"""agent_config.yaml: NexAU's files as they are written, and everything that can be wrong in them."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import ModuleType

import pydantic
import pytest
import yaml
from openai.types.chat import ChatCompletionToolParam

from nexrl_sdk.rollout.agent_config import AgentConfig, InMemoryTracer, Span, Tool, ToolResult, load_tracers
from nexrl_sdk.types import ConfigError, SamplingParams

pytestmark = pytest.mark.timeout(60)

GUIDE = Path(os.environ.get("NEXRL_SPEC") or Path(__file__).resolve().parents[3] / "shared" / "spec") / "user-guide.md"
TOOLS = """
def calculator(expression: str) -> str:
    \"\"\"Sum.\"\"\"
    return str(sum(int(x) for x in expression.split("+")))
"""
TOOL_FILE = """
type: tool
name: WebSearch
description: >-
  Search the web for information.

  Usage:
  - Returns titles
skill_description: "Use this skill to search."
input_schema:
  type: object
  properties:
    query:
      type: string
      description: Search query string
    num_results:
      type: integer
      default: 10
  required:
    - query
  additionalProperties: false
  $schema: http://json-schema.org/draft-07/schema#
"""
SEARCH = """
def web_search(query: str, num_results: int = 10, search_type: str = "search") -> dict:
    return {"status": "success", "query": query, "total_results": num_results, "kind": search_type}
"""
DEEP_RESEARCH = """
type: agent
name: deep_research_agent
max_context_tokens: 20000
max_iterations: 10
system_prompt: "Date: {{date}}. You search. Answer as <answer>Your answer</answer>"
system_prompt_type: string
tool_call_mode: openai
llm_config:
  temperature: 0.7
  max_tokens: 8192
  api_type: openai_chat_completion
  logprobs: True
  extra_body:
    train_mode: True
    include_stop_str_in_output: True
    skip_special_tokens: False
    return_tokens_as_token_ids: True
    min_tokens: 2
    chat_template_kwargs:
      enable_thinking: False
tools:
  - name: web_search
    yaml_path: ./tools/WebSearch.yaml
    binding: web_tool:web_search

tracers:
  - import: nexau.archs.tracer.adapters.in_memory:InMemoryTracer
"""


def write(folder: Path, **files: str) -> Path:
    """Files by name, with `__` for a folder and `_yaml`, `_py`, `_md` for the ending; the folder."""
    for name, text in files.items():
        path = folder / re.sub(r"(?<=[a-z0-9])__(?=[A-Za-z])", "/", re.sub(r"_(yaml|py|md|j2)$", r".\1", name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


def load(folder: Path, text: str, **options) -> AgentConfig:
    return AgentConfig.load(write(folder, agent_yaml=text) / "agent.yaml", **options)


def said(folder: Path, text: str, **options) -> str:
    with pytest.raises(ConfigError) as e:
        load(folder, text, **options)
    return str(e.value)


# --- files as they are written ---


def test_a_recipe_of_nexrl_with_a_tools_file(tmp_path):
    write(tmp_path, tools__WebSearch_yaml=TOOL_FILE, web_tool_py=SEARCH)
    agent = load(tmp_path, DEEP_RESEARCH)
    assert (agent.name, agent.max_context_tokens, agent.max_iterations) == ("deep_research_agent", 20000, 10)
    assert agent.prompt() == f"Date: {datetime.now():%Y-%m-%d}. You search. Answer as <answer>Your answer</answer>"
    assert agent.prompt(date="2020-02-02").startswith("Date: 2020-02-02.")
    assert agent.llm_config == {"temperature": 0.7, "max_tokens": 8192, "chat_template_kwargs": {"enable_thinking": False}}
    (tool,) = agent.tools
    assert tool.name == "web_search" and tool.description == "Search the web for information.\nUsage: - Returns titles"
    assert tool.parameters == yaml.safe_load(TOOL_FILE)["input_schema"]
    assert json.loads(tool.call('{"query": "q"}').text) == {"status": "success", "query": "q", "total_results": 10, "kind": "search"}
    assert "'search_type' was unexpected" in tool.call('{"query": "q", "search_type": "news"}').error
    assert {"llm_config.min_tokens", "llm_config.logprobs", "type", "tool_call_mode"} <= set(agent.ignored) and all(agent.ignored.values())
    assert isinstance(load_tracers(agent)[0], InMemoryTracer) and load_tracers(agent)[0] is not load_tracers(agent)[0]


@pytest.mark.skipif(not GUIDE.is_file(), reason="the user guide does not lie beside the checkout")
def test_the_user_guides_own_configurations(tmp_path):
    write(tmp_path, custom_tools_py=TOOLS)
    blocks = [b for b in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S) if "type: agent" in b]
    assert len(blocks) >= 2
    for block in blocks:
        agent = load(tmp_path, block)
        assert agent.name == "my_task_agent" and agent.max_context_tokens == 100_000 and agent.max_iterations == 100
        assert agent.prompt().startswith("You are") and agent.llm_config == {"temperature": 0.7, "max_tokens": 8192}
        assert [type(t) for t in load_tracers(agent)] == [InMemoryTracer]
    assert agent.tools[0].definition()["function"] == {
        "name": "calculator", "description": "Perform mathematical calculations",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"], "additionalProperties": False},
    }  # fmt: skip
    assert agent.tools[0].call('{"expression": "1+2"}').text == "3"


def test_defaults(tmp_path):
    agent = load(tmp_path, "name: a")
    assert (agent.max_iterations, agent.max_context_tokens, agent.tool_timeout, agent.tool_output_limit) == (100, 128_000, 30.0, 20_000)
    assert (agent.prompt(), agent.tools, agent.sub_agents, agent.stop_tools, agent.definitions(), load_tracers(agent)) == ("", [], {}, set(), [], [])
    assert AgentConfig().name == "agent" and AgentConfig.make().tools == []


def test_definitions_are_openais(tmp_path):
    write(tmp_path, tools__WebSearch_yaml=TOOL_FILE, web_tool_py=SEARCH, sub_yaml="name: inner\ndescription: Knows sums.", other_yaml="name: other")
    agent = load(tmp_path, DEEP_RESEARCH + "sub_agents:\n  - name: sums\n    config_path: sub.yaml\n  - config_path: ./other.yaml\nstop_tools: [web_search, sub-agent-sums]\n")
    definitions = agent.definitions()
    for definition in definitions:
        pydantic.TypeAdapter(ChatCompletionToolParam).validate_python(definition, strict=True)
    assert [d["function"]["name"] for d in definitions] == ["web_search", "sub-agent-sums", "sub-agent-other"]
    assert [d["function"]["description"] for d in definitions[1:]] == ["Knows sums.", "Delegate work to sub-agent 'other'."]
    assert definitions[1]["function"]["parameters"]["required"] == ["message"] and agent.sub_agents["sums"].name == "sums"
    assert agent.stop_tools == {"web_search", "sub-agent-sums"}


# --- what is refused ---


@pytest.mark.parametrize(
    "text,expected",
    [
        ("", "must be a YAML mapping, as in 'name: my_agent', not empty"),
        ("- a\n- b", "not list"),
        ("just text", "not str"),
        ("name: a\nname: b", "'name' is given twice (line 1)"),
        ("name: [", "while parsing"),
        ("name: a\n---\nname: b", "single document"),
        ("name: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("name: !!python/name:os.system", "could not determine a constructor"),
        ("? [a, b]\n: c", "unhashable key|no "),
        ("nane: a", "an agent has no 'nane'; did you mean 'name'?"),
        ("1: a", "an agent has no 1"),
        ("ignored: {a: b}", "an agent has no 'ignored'"),
        ("folders: [/]", "an agent has no 'folders'"),
        ("name: ''", "name must not be empty"),
        ("name: 5", "name must be text, not int"),
        ("type: team", "type must be 'agent', not 'team'"),
        ("tool_call_mode: xml", "tool_call_mode 'xml' cannot be honoured"),
        ("system_prompt: [a, b]", "system_prompt must be text, not list"),
        ("system_prompt_type: list", "must be one of string, file, jinja, not 'list'"),
        ("system_prompt_type: jinga", "did you mean 'jinja'?"),
        ("system_prompt_type: file", "names no file"),
        ("system_prompt: no.md\nsystem_prompt_type: file", "no.md does not exist"),
        ("max_iterations: 0", "max_iterations must be a whole number of at least 1, not 0"),
        ("max_iterations: '5'", "not '5'"),
        ("max_iterations: true", "not True"),
        ("max_iterations: 1.5", "not 1.5"),
        ("max_context_tokens: .nan", "not nan"),
        ("tool_timeout: 0", "tool_timeout must be more than 0 seconds"),
        ("tool_timeout: .inf", "tool_timeout must be more than 0 seconds"),
        ("tool_output_limit: 5", "at least 200, not 5"),
        ("tools: calculator", "tools must be a list, not str"),
        ("tools: {a: b}", "tools must be a list, not dict"),
        ("tools: [5]", "tools[0] must be a mapping with name and binding, not int"),
        ("tools: [{name: a}]", "tools[0] (a) needs a binding"),
        ("tools: [{name: a, bindign: 'x:y'}]", "has no 'bindign'; did you mean 'binding'?"),
        ("tools: [{name: a, binding: tools}]", "must name a module and what it defines"),
        ("tools: [{name: a, binding: 5}]", "no function"),
        ("tools: [{name: a, binding: 'my_toolz:add'}]", "did you mean 'my_tools'?"),
        ("tools: [{name: a, binding: 'my_tools:ad'}]", "defines no 'ad'; did you mean 'add'?"),
        ("tools: [{name: a, binding: 'my_tools:CONSTANT'}]", "and no function"),
        ("tools: [{name: a, binding: 'my_tools:Class'}]", "and no function"),
        ("tools: [{name: a, binding: 'no.py:add'}]", "no.py does not exist"),
        ("tools: [{name: a, binding: 'broken:add'}]", "broken.py cannot be imported: ZeroDivisionError"),
        ("tools: [{name: a, binding: ':x'}]", "must name a module"),
        ("tools: [{name: a, binding: '..:x'}]", "binding"),
        ("tools: [{name: a, binding: 'nexau.archs.tool.builtin.file_tools:read_file'}]", "no module 'nexau'|module 'nexau.archs.tool.builtin.file_tools' cannot be imported"),
        ("tools: [{name: 'two words', binding: 'my_tools:add'}]", "a tool's name has 1 to 64"),
        ("tools: [{name: 5, binding: 'my_tools:add'}]", "name must be text"),
        ("tools: [{binding: 'my_tools:add'}, {binding: 'my_tools:add'}]", "two tools are called 'add'"),
        ("tools: [{binding: 'my_tools:add', yaml_path: no.yaml}]", "no.yaml does not exist"),
        ("tools: [{binding: 'my_tools:add', yaml_path: agent.yaml}]", "has no 'tools'"),
        ("tools: [{binding: 'my_tools:add', parameters: {type: array}}]", "must have type 'object'"),
        ("tools: [{binding: 'my_tools:add', parameters: {}, input_schema: {}}]", "two names of the same"),
        ("tools: [{binding: 'my_tools:add', parameters: {properties: {a: {}, c: {}}}}]", "the schema offers 'c', which the function does not take"),
        ("tools: [{binding: 'my_tools:add', parameters: {properties: {b: {}}}}]", "the function wants 'a', which the schema does not offer"),
        ("tools: [{binding: 'my_tools:add', as_skill: true}]", "as_skill of NexAU is not supported"),
        ("tools: [{binding: 'my_tools:add', defer_loading: true}]", "defer_loading of NexAU is not supported"),
        ("tools: [{binding: 'my_tools:add', timeout: -1}]", "timeout must be more than 0"),
        ("tools: [{binding: 'my_tools:add', extra_kwargs: {agent_state: 1}}]", "extra_kwargs must be a mapping without agent_state"),
        ("tools: [{binding: 'my_tools:add', extra_kwargs: {c: 1}}]", "'c' is preset, and the function does not take it"),
        ("stop_tools: [ad]\ntools: [{binding: 'my_tools:add'}]", "stop_tools names 'ad', which is no tool of 'agent'; did you mean 'add'?"),
        ("stop_tools: add", "stop_tools must be a list"),
        ("sub_agents: a", "sub_agents must be a list"),
        ("sub_agents: [{name: a}]", "has name and config_path"),
        ("sub_agents: [a]", "has name and config_path"),
        ("sub_agents: [{name: a, config_path: no.yaml}]", "no.yaml does not exist"),
        ("sub_agents: [{name: a, config_path: 5}]", "config_path must be a path"),
        ("sub_agents: [{name: a, config_path: agent.yaml}]", "is a sub-agent of itself: agent.yaml -> agent.yaml"),
        ("llm_config: 5", "llm_config must be a mapping"),
        ("llm_config: {temprature: 1}", "llm_config has no 'temprature'; did you mean 'temperature'?"),
        ("llm_config: {temperature: -1}", "temperature must be 0 (greedy) or more, not -1"),
        ("llm_config: {temperature: hot}", "llm_config.temperature must be a number, not 'hot'"),
        ("llm_config: {temperature: .nan}", "must be a number"),
        ("llm_config: {max_tokens: 1.5}", "must be a whole number"),
        ("llm_config: {max_tokens: true}", "must be a number"),
        ("llm_config: {top_p: 0}", "top_p must be in (0, 1]"),
        ("llm_config: {stop: [1]}", "stop must be text or a list of texts"),
        ("llm_config: {stop: ['']}", "stop must be text or a list of texts"),
        ("llm_config: {seed: 3}", "llm_config.seed = 3 cannot be honoured: every rollout of a group"),
        ("llm_config: {frequency_penalty: 0.5}", "frequency_penalty = 0.5 cannot be honoured"),
        ("llm_config: {extra_body: {nonsense: 1}}", "llm_config has no 'nonsense'"),
        ("llm_config: {extra_body: 1}", "extra_body must be a mapping"),
        ("llm_config: {chat_template_kwargs: 1}", "chat_template_kwargs must be a mapping"),
        ("mcp_servers: [{name: a}]", "mcp_servers of NexAU is not supported: write the server's tools as functions"),
        ("middlewares: [a:b]", "middlewares of NexAU is not supported"),
        ("skills: [./s]", "skills of NexAU is not supported"),
        ("before_tool_hooks: [a:b]", "before_tool_hooks of NexAU is not supported"),
        ("sandbox_config: {type: local}", "sandbox_config of NexAU is not supported"),
        ("tracers: [5]", "a tracer is 'module:Class'"),
        ("tracers: [{imports: 'a:b'}]", "an entry of tracers has import"),
        ("tracers: a:b", "tracers must be a list"),
        ("context: 5", "context must be a mapping"),
        ("name: ${env.NEXRL_NOT_THERE}", "${env.NEXRL_NOT_THERE}: the environment variable NEXRL_NOT_THERE is not set"),
        ("name: ${variables.a}", "'variables' has no 'a'"),
        ("variables: {paths: {c: 1}}\nname: ${variables.path.c}", "did you mean 'paths'?"),
        ("variables: {ab: {c: 1}}\nname: ${variables.ab}", "is a dict; only a single value"),
        ("a: &a [*a]", "contains itself"),
        ("name: 2024-99-99", "month must be in 1..12|agent"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, expected):
    write(tmp_path, my_tools_py="CONSTANT = 5\nclass Class: pass\ndef add(a: int, b: int = 1) -> int:\n    return a + b\n", broken_py="1 / 0\n")
    if text == "name: 2024-99-99":
        assert load(tmp_path, "name: '2024-99-99'").name == "2024-99-99"
    message = said(tmp_path, text, environ={})
    assert any(x in message for x in expected.split("|")), message
    assert "agent.yaml" in message and len(message) < 2000


def test_what_nexau_would_not_mind_either(tmp_path):
    agent = load(tmp_path, "name: a\nmcp_servers: []\nskills: []\nmiddlewares:\nsandbox_config: {}\nllm_config: {frequency_penalty: 0, seed: null, model: m, api_key: hush-hush, base_url: u}\nretry_attempts: 5\ntracers:\ntools:\nsub_agents: []\nstop_tools: []")
    assert agent.llm_config == {} and "hush" not in repr(agent)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.yaml does not exist; did you mean 'agents\.yaml'"):
        AgentConfig.load(write(tmp_path, agents_yaml="name: a") / "agent.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        AgentConfig.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        AgentConfig.load(tmp_path / "latin.yaml")
    (tmp_path / "zero.yaml").write_bytes(b"name: a\x00b")
    with pytest.raises(ConfigError, match="special characters are not allowed"):
        AgentConfig.load(tmp_path / "zero.yaml")
    (tmp_path / "big.yaml").write_text("name: " + "a" * 2_000_000)
    with pytest.raises(ConfigError, match="a configuration has 1000000 at most"):
        AgentConfig.load(tmp_path / "big.yaml")


BOMB = "a: &a [x, x]\n" + "".join(f"{n}: &{n} [" + ", ".join([f"*{m}"] * 10) + "]\n" for m, n in zip("abcdefghijkl", "bcdefghijklm"))
MERGES = "a: &a {x: 1}\n" + "".join(f"{n}: &{n}\n  <<: [" + ", ".join([f"*{m}"] * 10) + "]\n" for m, n in zip("abcdefghijkl", "bcdefghijklm"))


@pytest.mark.parametrize("text", [BOMB, MERGES])
def test_aliases_that_explode(tmp_path, text):
    assert "aliases written out would be more than" in said(tmp_path, text)


@pytest.mark.parametrize("text", ["name: " + "[" * 2_000, "name: " + "{a: " * 2_000, "name:\n" + "".join(" " * i + "- \n" for i in range(1, 1000))])
def test_deep_nesting(tmp_path, text):
    assert "agent.yaml" in said(tmp_path, text)


def test_many_keys_take_no_time(tmp_path):
    assert "an agent has no" in said(tmp_path, "".join(f"k{i}: 1\n" for i in range(5_000)))


def test_anchors_and_merges_may_be_used(tmp_path):
    agent = load(tmp_path, "variables: &v {temperature: 0.5}\nname: a\nllm_config:\n  <<: *v\n  max_tokens: 5\n")
    assert agent.llm_config == {"temperature": 0.5, "max_tokens": 5}


# --- variables ---


def test_variables(tmp_path):
    environ = {"NAME": "x: [y]\nevil: 1", "NUMBER": "7", "HOT": "0.5", "EMPTY": ""}
    agent = load(
        tmp_path,
        """
        variables: {who: {name: "${env.NUMBER}", count: 3}}
        name: ${env.NAME}
        description: "a ${variables.who.name} b ${variables.who.count} ${env.EMPTY}c ${HOME} $${x} ${this_file_dir}"
        max_iterations: ${env.NUMBER}
        max_context_tokens: ${variables.who.count}
        llm_config: {temperature: ${env.HOT}, model: "${env.LLM_MODEL}", api_key: ${env.LLM_API_KEY}}
        system_prompt: "${env.NUMBER}"
        # ${env.IN_A_COMMENT}
        """,
        environ=environ,
    )
    assert agent.name == "x: [y]\nevil: 1" and agent.description == f"a 7 b 3 c ${{HOME}} $${{x}} {tmp_path}"
    assert agent.max_iterations == 7 and agent.max_context_tokens == 3 and agent.llm_config == {"temperature": 0.5} and agent.system_prompt == "7"


def test_the_processs_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("NEXRL_TEST_AGENT", "from outside")
    assert load(tmp_path, "name: ${env.NEXRL_TEST_AGENT}").name == "from outside"
    assert "NEXRL_TEST_AGENT is not set" in said(tmp_path, "name: ${env.NEXRL_TEST_AGENT}", environ={})


def test_overrides(tmp_path):
    agent = load(tmp_path, "name: a\nllm_config: {temperature: 0.5, max_tokens: 9}\nmax_iterations: 5", overrides={"llm_config": {"temperature": 1.0}, "max_iterations": 7, "name": "b"})
    assert agent.llm_config == {"temperature": 1.0, "max_tokens": 9} and agent.max_iterations == 7 and agent.name == "b"
    assert "an agent has no 'max_iteration'" in said(tmp_path, "name: a", overrides={"max_iteration": 1})


# --- prompts ---


def test_prompts_from_files(tmp_path):
    write(tmp_path, prompts__system_md="\n  You are {{ agent_name }}.\n{% if topic %}\nTopic: {{ topic }}\n{% endif %}\n")
    for kind in ("file", "jinja"):
        agent = load(tmp_path, f"name: a\nsystem_prompt: ./prompts/system.md\nsystem_prompt_type: {kind}\ncontext: {{topic: sums}}")
        assert agent.prompt() == "You are a.\nTopic: sums" and agent.prompt(topic="") == "You are a."
    assert "set system_prompt_type to 'file'" in said(tmp_path, "system_prompt: ./prompts/system.md")
    (tmp_path / "prompts/system.md").unlink()
    assert agent.prompt() == "You are a.\nTopic: sums"


def test_prompts_are_relative_to_the_file_and_then_the_workspace(tmp_path):
    write(tmp_path, config__p_md="beside", work__p_md="workspace", work__q_md="only here")
    for name, text in (("p", "beside"), ("q", "only here")):
        assert load(tmp_path / "config", f"system_prompt: {name}.md\nsystem_prompt_type: file", workspace=tmp_path / "work").prompt() == text


def test_prompts_that_cannot_be_rendered():
    def error(prompt: str, **context) -> str:
        with pytest.raises(ConfigError) as e:
            AgentConfig.make(prompt).prompt(**context)
        return str(e.value)

    assert AgentConfig.make("a{% if topic %} and {{ topic }}{% endif %}{{ x or 'b' }}").prompt() == "ab"
    assert "'items' is undefined" in error("{% for i in items %}{{ i }}{% endfor %}") and "is undefined" in error("{{ a + 1 }}")
    assert "'topik' is undefined; did you mean 'topic'?" in error("{{ topik }}", topic=1)
    assert "give it as prompt(x=…) or under 'context'" in error("{{ x }}")
    assert "is no Jinja template" in error("{{ x") and "{% raw %}" in error("{% nonsense %}")
    assert "has no attribute 'b'" in error("{{ a.b }}", a=1)
    assert "unsafe" in error("{{ ''.__class__.__mro__ }}") and "unsafe" in error("{{ f.__globals__ }}", f=error)
    assert "cannot be rendered: SecurityError" in error("{{ items.append(1) }}", items=[])
    assert "cannot be rendered: OverflowError" in error("{% for i in range(10 ** 9) %}x{% endfor %}")
    assert "cannot be rendered: ZeroDivisionError" in error("{{ 1 / 0 }}")
    assert "cannot be rendered" in error("{% include '/etc/passwd' %}")


def test_prompts_keep_what_is_text():
    for text in ("", "plain", "Ångström 数学 😀", 'JSON: {"a": {"b": 1}} and {x}', "100 % sure # really", "<|im_end|> stays", r"\boxed{x^2}", "two\n\nlines"):
        assert AgentConfig.make(text).prompt() == text
    assert AgentConfig.make("{% raw %}{{ x }}{% endraw %}").prompt() == "{{ x }}"
    assert AgentConfig.make("{{ user }}").prompt(user="{{ secret }}<b>&") == "{{ secret }}<b>&"


def test_own_names_in_prompts():
    text = AgentConfig.make("{{ agent_name }} {{ date }} {{ timestamp }} {{ system_prompt_type }}", name="n").prompt()
    name, date, stamp, kind = text.split()
    assert (name, kind) == ("n", "string") and datetime.fromisoformat(stamp).strftime("%Y-%m-%d") == date


def test_prompts_from_many_threads():
    agent = AgentConfig.make("You are {{ x }}.")
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda i: agent.prompt(x=i), range(200))) == [f"You are {i}." for i in range(200)]


# --- tools and their modules ---


@pytest.mark.parametrize("package", [True, False])
def test_workspaces_with_modules_of_the_same_name(tmp_path, package):
    for name in ("one", "two"):
        write(
            tmp_path / name,
            custom_tools_py=f"import helper\nfrom tools import shared\ndef who() -> str:\n    return helper.NAME + shared.NAME + {name!r}\n",
            helper_py=f"NAME = 'helper of {name}, '\n",
            **({"tools/__init___py": ""} if package else {}),
            tools__shared_py=f"NAME = 'shared of {name}, '\n",
            tools__deep_py="import helper\nfrom tools.shared import NAME\ndef deep() -> str:\n    return helper.NAME + NAME\n",
        )
    before = list(sys.path)
    text = "tools: [{binding: 'custom_tools:who'}, {binding: 'tools.deep:deep'}, {name: by_path, binding: 'custom_tools.py:who'}]"
    agents = {name: load(tmp_path / "config", text, workspace=tmp_path / name) for name in ("one", "two", "one")}
    assert sys.path == before and "custom_tools" not in sys.modules
    for name, agent in agents.items():
        assert [t.call({}).text for t in agent.tools] == [f"helper of {name}, shared of {name}, {name}", f"helper of {name}, shared of {name}, ", f"helper of {name}, shared of {name}, {name}"]


def test_the_workspace_comes_before_what_is_installed(tmp_path):
    write(tmp_path, json_py="def dumps(x: str) -> str:\n    return 'mine'\n", colorsys_py="def mine() -> str:\n    return 'mine'\n")
    agent = load(tmp_path, "tools: [{binding: 'colorsys:mine'}]")
    assert agent.tools[0].call({}).text == "mine"
    import colorsys

    assert hasattr(colorsys, "rgb_to_hsv")
    installed = load(tmp_path, "tools: [{binding: 'textwrap:dedent'}]")
    assert installed.tools[0].call({"text": "  a"}).text == "a"


def test_an_edited_module_is_read_anew(tmp_path):
    for answer in ("first", "second"):
        write(tmp_path, custom_tools_py=f"def who() -> str:\n    return {answer!r}\n")
        assert load(tmp_path, "tools: ['custom_tools:who']").tools[0].call({}).text == answer


def test_neighbours_that_are_imported_too_late(tmp_path):
    write(tmp_path, helper_py="NAME = 'n'\n", late_py="import json\ndef fine() -> str:\n    import os\n    return os.sep\ndef who() -> str:\n    from helper import NAME\n    return NAME\n", top_py="from helper import NAME\ndef who() -> str:\n    return NAME\n")
    message = said(tmp_path, "tools: ['late:fine']")
    assert "late.py, line 6: 'helper' is imported when who is called; import it at the top" in message
    assert load(tmp_path, "tools: ['top:who']").tools[0].call({}).text == "n"


def test_what_nexau_would_fill_in(tmp_path):
    write(tmp_path, t_py="def search(query: str, agent_state) -> str:\n    return query\ndef kept(query: str, agent_state=None, global_storage=None) -> str:\n    return query\n")
    for entry in ("t:search", "{binding: 't:search', parameters: {properties: {query: {type: string}}}}"):
        assert "the tool 'search' wants 'agent_state', which NexAU fills in" in said(tmp_path, f"tools: [{entry}]")
    (tool,) = load(tmp_path, "tools: ['t:kept']").tools
    assert tool.needs == {"agent_state", "global_storage"} and tool.call({"query": "q"}).text == "q"


def test_inline_schemas_and_entries(tmp_path):
    write(tmp_path, t_py='from nexrl_sdk.rollout.agent_config import Tool\ndef add(a, b=1):\n    """Add."""\n    return a + b\nready = Tool.from_function(lambda: "ready", name="ready")\n')
    agent = load(
        tmp_path,
        """
        tool_timeout: 7
        tool_output_limit: 300
        tools:
          - {name: plus, binding: 't:add', parameters: {type: object, properties: {a: {type: integer}}, required: [a]}, timeout: 3, extra_kwargs: {b: 40}, lazy: true, disable_parallel: true}
          - {name: sum, binding: 't:add', input_schema: {properties: {a: {type: integer}, b: {type: integer}}}, description: Sum.}
          - t:add
          - {name: other, binding: 't:ready'}
        """,
    )
    plus, total, plain, ready = agent.tools
    assert (plus.name, plus.description, plus.timeout, plus.output_limit, plus.call({"a": 2}).text) == ("plus", "Add.", 3, 300, "42")
    assert (total.description, total.timeout, total.call({"a": 2}).text) == ("Sum.", 7, "3") and "not of type" in total.call({"a": "x"}).error
    assert plain.name == "add" and plain.call({"a": "x", "b": "y"}).text == "xy"
    assert ready.name == "other" and ready.call({}).text == "ready"


def test_make_takes_functions_and_limits(tmp_path):
    release = threading.Event()

    def hang() -> str:
        release.wait(40)
        return ""

    def flood() -> str:
        return "x" * 1_000_000

    agent = AgentConfig.make("You call.", tools=[hang, flood, Tool.from_function(flood, name="own", output_limit=1000)], tool_timeout=0.05, tool_output_limit=200, stop_tools=["flood"], llm_config={"temperature": 0.5})
    results = [t.call("{}") for t in agent.tools]
    release.set()
    assert isinstance(results[0], ToolResult) and "took longer than 0.05 s" in results[0].error
    assert len(results[1].text) == 200 and results[1].truncated and len(results[2].text) == 1000
    assert agent.stop_tools == {"flood"} and agent.llm_config == {"temperature": 0.5}
    same = AgentConfig(system_prompt="You call.", tools=[hang])  # type: ignore[list-item]
    assert same.tools[0].name == "hang"
    for wrong, expected in (({"tool": []}, "did you mean 'tools'"), ({"tools": [int]}, "needs a function"), ({"llm_config": {"temp": 1}}, "has no 'temp'")):
        with pytest.raises(ConfigError, match=expected):
            AgentConfig.make(**wrong)
    for wrong in ({"tools": [5]}, {"sub_agents": {"a": 5}}, {"llm_config": {"temp": 1}}, {"sub_agents": {"a b": AgentConfig()}}):
        with pytest.raises(ConfigError):
            AgentConfig(**wrong)


def test_sampling_is_what_sampling_params_takes(tmp_path):
    agent = load(tmp_path, "llm_config: {temperature: 0.5, max_tokens: 10, top_p: 0.9, stop: ['</answer>'], extra_body: {top_k: 5, min_p: 0.1}}")
    assert SamplingParams(**agent.llm_config) == SamplingParams(temperature=0.5, max_tokens=10, top_p=0.9, top_k=5, min_p=0.1, stop=["</answer>"])


# --- sub-agents ---


def test_sub_agents_are_read_recursively(tmp_path):
    write(tmp_path, a__b_yaml="name: b\nsub_agents: [{name: c, config_path: ../c.yaml}]", c_yaml="name: see\nsystem_prompt: 'I am {{ agent_name }}'", t_py="def who() -> str:\n    return 'w'\n")
    agent = load(tmp_path, "name: top\nsub_agents:\n  b: a/b.yaml\n  c: {config_path: c.yaml}")
    assert agent.sub_agents["b"].sub_agents["c"].prompt() == "I am c" == agent.sub_agents["c"].prompt()
    made = AgentConfig.make(name="m", sub_agents={"x": agent.sub_agents["c"], "y": agent})
    assert list(made.sub_agents) == ["x", "y"] and made.sub_agents["x"].prompt() == "I am x" and agent.name == "top"


def test_circles_of_sub_agents(tmp_path):
    write(tmp_path, b_yaml="name: b\nsub_agents: [{name: c, config_path: c.yaml}]", c_yaml="name: c\nsub_agents: [{name: b, config_path: ./b.yaml}]")
    message = said(tmp_path, "sub_agents: [{name: b, config_path: b.yaml}]")
    assert "is a sub-agent of itself: b.yaml -> c.yaml -> b.yaml" in message


def test_sub_agents_shared_by_many_are_read_once(tmp_path):
    for i in range(12):
        write(tmp_path, **{f"n{i}_yaml": "name: n\nsub_agents: [" + ", ".join(f"{{name: s{j}, config_path: n{i + 1}.yaml}}" for j in range(10)) + "]"})
    write(tmp_path, n12_yaml="name: leaf")
    agent = load(tmp_path, "sub_agents: [{name: a, config_path: n0.yaml}]")
    for _ in range(12):
        agent = next(iter(agent.sub_agents.values()))
    assert len(agent.sub_agents) == 10 and "'s9'" in repr(agent)


@pytest.mark.parametrize("entries,expected", [("[{name: a, config_path: s.yaml}, {name: a, config_path: s.yaml}]", "names 'a' twice"), ("[{name: 'a b', config_path: s.yaml}]", "a sub-agent's name has"), ("[{name: [1], config_path: s.yaml}]", "must be text")])
def test_names_of_sub_agents(tmp_path, entries, expected):
    write(tmp_path, s_yaml="name: s")
    assert expected in said(tmp_path, f"sub_agents: {entries}")


def test_what_is_wrong_in_a_sub_agent_names_its_file(tmp_path):
    write(tmp_path, s_yaml="name: s\nmax_iteration: 3")
    message = said(tmp_path, "sub_agents: [{name: s, config_path: s.yaml}]")
    assert message.count("s.yaml: an agent has no 'max_iteration'") == 1


# --- tracers ---


def test_tracers(tmp_path):
    write(tmp_path, my_tracer_py="class Mine:\n    def __init__(self, n=0):\n        self.n = n\n    def start_span(self, *a): ...\n    def end_span(self, *a): ...\nclass Broken(Mine):\n    def __init__(self):\n        raise OSError('no disk')\nclass Other: ...\n")
    both = "nexau.archs.tracer.adapters:InMemoryTracer"
    agent = load(tmp_path, f"tracers:\n  - import: {both}\n    params: {{max_spans: 5}}\n  - my_tracer:Mine\n  - import: my_tracer:Mine\n    params: {{n: 3}}")
    ours, plain, three = load_tracers(agent)
    assert isinstance(ours, InMemoryTracer) and plain.n == 0 and three.n == 3 and load_tracers(agent)[1] is not plain
    shared = InMemoryTracer()
    assert load_tracers(AgentConfig.make(tracers=[shared, "my_tracer.py:Mine"], name="x"))[0] is shared if (Path.cwd() / "my_tracer.py").exists() else True
    for name, expected in (("my_tracer:Broken", "cannot be made: OSError: no disk"), ("my_tracer:Other", "has no start_span"), ("my_tracer:Mina", "did you mean 'Mine'"), ("nexau.archs.tracer.adapters.langfuse:LangfuseTracer", "no module 'nexau'|cannot be imported"), ("nowhere:X", "no module 'nowhere'")):
        with pytest.raises(ConfigError, match=expected):
            load_tracers(load(tmp_path, f"tracers: [{{import: '{name}'}}]"))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'k'"):
        load_tracers(load(tmp_path, "tracers: [{import: 'my_tracer:Mine', params: {k: 1}}]"))


def test_nexaus_own_tracer_is_used_where_it_is_installed(tmp_path, monkeypatch):
    class Theirs(InMemoryTracer):
        pass

    for name in ("nexau", "nexau.archs", "nexau.archs.tracer", "nexau.archs.tracer.adapters", "nexau.archs.tracer.adapters.in_memory"):
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    module.InMemoryTracer = Theirs  # type: ignore[attr-defined]
    agent = load(tmp_path, "tracers: [{import: 'nexau.archs.tracer.adapters.in_memory:InMemoryTracer'}]")
    assert type(load_tracers(agent)[0]) is Theirs


def test_a_tracer_object_may_be_given():
    shared = InMemoryTracer()
    assert load_tracers(AgentConfig.make(tracers=[shared])) == [shared]
    span = shared.start_span("a", "agent")
    assert isinstance(span, Span)


def test_nothing_leaks_into_the_process(tmp_path):
    write(tmp_path, tools__WebSearch_yaml=TOOL_FILE, web_tool_py=SEARCH)
    before, environ, folder = list(sys.path), dict(os.environ), Path.cwd()
    with ThreadPoolExecutor(8) as pool:
        agents = list(pool.map(lambda _: AgentConfig.load(tmp_path / "agent.yaml"), range(16))) if load(tmp_path, DEEP_RESEARCH) else []
    assert len({a.prompt(date="d") for a in agents}) == 1 and sys.path == before and dict(os.environ) == environ and Path.cwd() == folder


# --- files without an end, values of the environment, YAML's own failures ---


def written(folder, text, **environ):
    (folder / "custom_tools.py").write_text("def look(q: str, key: str = ''):\n    return q\n\n\nclass Tracer:\n    def __init__(self, key):\n        raise ValueError(key)\n")
    (folder / "agent.yaml").write_text(text)
    return AgentConfig.load(folder / "agent.yaml", environ=environ)


def test_files_without_an_end_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long.md").write_bytes(b"x" * 1_000_001)
    for name, expected in (("/dev/zero", "is no ordinary file"), ("pipe", "is no ordinary file"), (".", "Is a directory"), ("long.md", "a configuration has 1000000 at most")):
        with pytest.raises(ConfigError, match=expected):
            written(tmp_path, f"system_prompt: {name}\nsystem_prompt_type: file\n")
        with pytest.raises(ConfigError, match=expected):
            written(tmp_path, f"tools: [{{yaml_path: {name}}}]\n")
    (tmp_path / "just.md").write_bytes(b"x" * 999_999 + b"\r")
    assert len(written(tmp_path, "system_prompt: just.md\nsystem_prompt_type: file\n").template) == 999_999


SECRET, NUMBER = "sk-secret-123456", "-77777"
LEAKS = {
    "tracers: [{import: 'a:b', parms: {secret_key: '${env.X}'}}]": "an entry of tracers has import",
    "tools: [{name: look, binding: 'custom_tools:look', extra_kwargs: {key: '${env.X}', ctx: 1}}]": "extra_kwargs must be a mapping without .* not one with 'ctx'",
    "tools: [{name: look, binding: 'custom_tools:look', extra_kwargs: ['${env.X}']}]": "extra_kwargs must be a mapping without .* not list",
    "tools: [{binding: 'custom_tools:look', parameters: {type: object, properties: {q: {}, key: {maxLength: 3}}}, extra_kwargs: {key: '${env.X}'}}]": "what is preset for 'key' does not fit",
    "sub_agents: [{name: s, config_path: x.yaml, token: '${env.X}'}]": "not name, config_path, token",
    "sub_agents: ['${env.X}']": r"str '\$\{env\.X\}'",
    "tools: [{name: look, binding: 'custom_tools:look', timeout: '${env.X}'}]": r"not '\$\{env\.X\}'",
    "llm_config: {seed: '${env.X}'}": r"seed = '\$\{env\.X\}' cannot",
    "llm_config: {temperature: 'a ${env.X} b'}": r"not 'a \$\{env\.X\} b'",
    "llm_config: {stop: [3, '${env.X}']}": r"not \[3, '\$\{env\.X\}'\]",
    "max_iterations: ${env.X}": r"not '\$\{env\.X\}'",
    "max_iterations: ${env.N}": r"not \$\{env\.N\}",
    "tools: [{binding: '${env.X}'}]": r"'\$\{env\.X\}' must name a module",
    "tools: [{binding: 'custom_tools:${env.X}'}]": r"defines no '\$\{env\.X\}'",
    "system_prompt: ${env.X}\nsystem_prompt_type: file": r"\$\{env\.X\} does not exist",
    "system_prompt_type: ${env.X}": r"not '\$\{env\.X\}'",
    "variables: {a: '${env.X}'}\nmax_iterations: ${variables.a}": r"not '\$\{env\.X\}'",
    "stop_tools: ['${env.X}']": r"names '\$\{env\.X\}'",
}  # fmt: skip


@pytest.mark.parametrize("text", LEAKS)
def test_values_of_the_environment_are_not_in_errors(text, tmp_path):
    with pytest.raises(ConfigError, match=LEAKS[text]) as raised:
        written(tmp_path, text + "\n", X=SECRET, N=NUMBER)
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown and NUMBER not in shown


def test_values_of_the_environment_are_not_told_later(tmp_path):
    agent = written(tmp_path, "tracers: [{import: 'custom_tools:Tracer', params: {key: '${env.X}'}}]\ntools: [{binding: 'custom_tools:look', extra_kwargs: {key: '${env.X}'}}]\nsystem_prompt: \"{{ k['${env.X}'] }}\"\ncontext: {k: {}}\n", X=SECRET)
    for late in (lambda: load_tracers(agent), lambda: agent.prompt(k=[])):
        with pytest.raises(ConfigError) as raised:
            late()
        assert SECRET not in "".join(traceback.format_exception(raised.value))
    assert SECRET not in repr(agent) and SECRET not in json.dumps(agent.definitions()) and SECRET not in repr(agent.tools)

    def broken(q: str, key: str = "") -> str:
        raise ConnectionError(f"no answer for {key}")

    agent.tools[0].function = broken
    assert agent.tools[0].call({"q": "x"}).text == "Error: look raised ConnectionError: no answer for ${env.X}"


LONG = "a" * 300


@pytest.mark.parametrize(
    "text",
    [
        "name: !!int ''", "name: !!float ''", "name: !!bool x", "name: !!timestamp x", "name: !!int x", "tool_timeout: " + "1:" * 190 + "1.5", "tools: ['~nobodyy/x.py:f']", f"tools: ['{LONG}.py:f']", f"tools: ['{LONG}:f']",
        'tools: ["a\\0.py:f"]', 'tools: ["a\\0:f"]', 'system_prompt: "a\\0b"\nsystem_prompt_type: file', f"system_prompt: {LONG}\nsystem_prompt_type: file", "system_prompt: ~nobodyy/x\nsystem_prompt_type: file",
        'sub_agents: [{name: s, config_path: "a\\0b"}]', "sub_agents: [{name: s, config_path: ~nobodyy/x}]", "tools: [{yaml_path: '" + "a" * 5000 + "'}]", "tools: [{yaml_path: a/b/c/d.yaml}]", "system_prompt: a.md/x\nsystem_prompt_type: file", 'tools: [{yaml_path: "\\ud800"}]', 'system_prompt: "\\ud800"\nsystem_prompt_type: file',
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_a_configuration_error(text, tmp_path):
    with pytest.raises(ConfigError):
        written(tmp_path, text + "\n")
    for odd in ("a\0b", "~nobodyy/x.yaml", LONG + ".yaml"):
        with pytest.raises(ConfigError):
            AgentConfig.load(odd)


@pytest.mark.parametrize("text", ["max_iterations: " + "1:" * 150_000 + "1", "tool_timeout: " + "1:" * 100_000 + "1.5", "max_iterations: ${env.LONG}", "max_iterations: 0x" + "f" * 900_000])
def test_numbers_have_an_end(text, tmp_path):
    with pytest.raises(ConfigError, match=r"a number of [0-9]+ characters"):
        written(tmp_path, text, LONG="1:" * 150_000 + "1")
    assert written(tmp_path, "max_iterations: 1:30\ntool_timeout: 1:00.5").max_iterations == 90


@pytest.mark.parametrize(
    "prompt",
    ["{{ 'a' * 3000000000 }}", "{{ 3000000000 * 'a' }}", "{{ ([1] * 30000000)|length }}", "{{ 9 ** 9 ** 99999 }}", "{% for i in range(99999) %}{{ 'a' * 999999 }}{% endfor %}", "{{ 'a' * 999999 ~ 'b' * 999999 }}"],
)
def test_a_prompt_has_an_end(prompt):
    with pytest.raises(ConfigError, match="cannot be rendered: OverflowError"):
        AgentConfig.make(prompt).prompt()
    assert AgentConfig.make("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}").prompt() == "---10243.00.5"


def test_many_tools_of_one_file_read_it_once(tmp_path, monkeypatch):
    (tmp_path / "many.py").write_text("".join(f"def f{i}(a: int) -> int:\n    import json\n    return a\n" for i in range(60)))
    import nexrl_sdk.rollout.agent_config as module

    parsed, parse = [], module.ast.parse
    monkeypatch.setattr(module.ast, "parse", lambda source: parsed.append(1) or parse(source))
    agent = written(tmp_path, "tools: [" + ", ".join(f"'many:f{i}'" for i in range(60)) + "]")
    assert len(agent.tools) == 60 and len(parsed) == 1


def test_a_text_in_the_place_of_a_file_is_told(tmp_path):
    for kind in ("jinja", "file"):
        for prompt in ("You are {{ agent_name }}.", "You are an agent.", "Be\nbrief"):
            with pytest.raises(ConfigError, match=f"system_prompt_type '{kind}' wants the path of a file, and system_prompt is text: set system_prompt_type to 'string', which is rendered by Jinja too"):
                AgentConfig.make(prompt, system_prompt_type=kind)
        with pytest.raises(ConfigError, match=r"prompt\.xyz does not exist") as raised:
            written(tmp_path, f"system_prompt: prompt.xyz\nsystem_prompt_type: {kind}")
        assert "(valid: )" not in str(raised.value)
    (tmp_path / "my own prompt.md").write_text("Hello")
    assert written(tmp_path, "system_prompt: my own prompt.md\nsystem_prompt_type: file").prompt() == "Hello"
