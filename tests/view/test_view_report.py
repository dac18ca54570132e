"""The report: one page, whole, inert, from any run folder; and what a browser makes of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from view_oracle import ATTACKS, check

from nexrl_sdk.rollout.rollouts import Rollouts
from nexrl_sdk.types import ConfigError, RunFolderError, Trajectory
from nexrl_sdk.view import report as rep
from nexrl_sdk.view.rollouts import rollouts_html, step_html


def make_run(folder: Path, *, steps=40, attack="plain", finished=True, val=True) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    lines = [{"step": 0, "val/reward/mean": 0.4, "val/pass@1": 0.1}] if val else []
    lines += [{"step": s, "reward/mean": 0.4 + 0.5 * s / steps, "loss": 0.1, "grad_norm": None if s == 7 else 1.0, "errors/evaluator": float(s == 5), f"custom/{attack[:200]}": s} for s in range(1, steps + 1)]
    lines += [{"step": steps, "val/reward/mean": 0.9, "val/pass@1": 0.7}] if val else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    recipe = {"experiment_name": attack, "algorithm": {"type": "grpo"}, "model": {"path": attack}, "trainer": {"total_train_steps": steps}, "logger": {"api_key": "s3cr3t"}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "packages": {"torch": attack}, "gpu": None}), encoding="utf-8")
    for s in (1, steps):
        rows = [{"prompt": f"{attack}{i}", "response": attack, "tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -0.1], "reward": s / steps, "group_id": f"0:{i}", "status": "ok"} for i in range(6)]
        rows += [{"prompt": attack, "status": "error", "error": f"E{s}: {attack}", "reward": None}]
        (folder / "rollouts" / f"step_{s:06d}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows), encoding="utf-8")
    if finished:
        (folder / "summary.json").write_text(json.dumps({"reward/before": 0.4, "reward/after": 0.9, "reward/of": "held-out rows", "steps": steps, "seconds": 12.5}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("attack", ATTACKS, ids=[str(i) for i in range(len(ATTACKS))])
def test_attacks_are_inert(attack, tmp_path):
    page = check(rep.write_report(make_run(tmp_path / "run", attack=attack)).read_text(encoding="utf-8"), limit=600_000)
    assert "s3cr3t" not in page.text
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "script" not in policy


def test_what_the_page_says(tmp_path):
    page = check(rep.report_html(make_run(tmp_path / "reverse")))
    for said in ("The held-out reward rose from 0.40 to 0.90 in 40 steps and 12 s.", "finished", "Gradient norm", "custom/plain", "E#", "step 1", "step 40", "nexrl resume", "total_train_steps", "torch"):
        assert said.replace("E#", "E1: plain") in page.text, said
    anchors = {a["href"][1:] for t, a in page.tags if t == "a"}
    assert anchors <= {a.get("id") for _, a in page.tags}
    assert "grad_norm is NaN" in page.text or "norm is NaN" in page.text


def test_same_prompts_stand_side_by_side(tmp_path):
    page = check(rep.report_html(make_run(tmp_path / "r")))
    assert page.count("div", class_="nx-pair") == 4 and page.count("div", class_="nx-said") == 8
    assert page.text.count("plain0") == 1


def test_held_out_answers_are_preferred(tmp_path):
    run = make_run(tmp_path / "r")
    for s, said in ((0, "BEFORE"), (40, "AFTER")):
        (run / "rollouts" / f"val_{s:06d}.jsonl").write_text(json.dumps({"prompt": "held", "response": said, "reward": 0.5, "status": "ok"}) + "\n")
    page = check(rep.report_html(run))
    assert "The first 1 held-out prompt." in page.text and "after step 0" in page.text
    assert page.text.index("BEFORE") < page.text.index("AFTER") and "plain0" not in page.text.split("Failures")[0]


def test_an_unfinished_run_has_a_page(tmp_path):
    run = make_run(tmp_path / "r", finished=False, val=False)
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"step": 41, "reward/me')
    page = check(rep.report_html(run))
    assert "not finished: step 40 of 40" in page.text and "The training reward rose from 0.47 to 0.84" in page.text and "go on where it stands" in page.text


@pytest.mark.parametrize("gone", ["recipe.yaml", "metrics.jsonl", "environment.json", "rollouts", "summary.json"])
def test_whatever_is_missing_is_left_out(tmp_path, gone):
    run = make_run(tmp_path / "r")
    shutil.rmtree(run / gone) if (run / gone).is_dir() else (run / gone).unlink()
    check(rep.report_html(run))


def test_damaged_files_do_no_harm(tmp_path):
    run = make_run(tmp_path / "r")
    (run / "recipe.yaml").write_text("a: [1, 2\n  b: {")
    (run / "environment.json").write_text("[1, 2]")
    (run / "summary.json").write_text('{"reward/before": "high", "seconds": "long"}')
    deep = '{"a":' * 50_000
    (run / "metrics.jsonl").write_text(f'[]\n{deep}\nnull\n{{"step": "x", "a": 1}}\n{{"step": 1, "a": {"9" * 2000}, "b": "text", "c": [1], "d": true, "e": 1e999, "reward/mean": null}}\n\xff\n{{"step": 2, "e": NaN}}\n')
    (run / "rollouts" / "step_000001.jsonl").write_bytes(b'\xff\xfe\n{"tokens": [null, "x"], "loss_mask": {"a": 1}, "logprobs": "zz", "reward": "good", "status": ["ok"]}\n' + b'{"status": "error"}\n')
    page = check(rep.report_html(run))
    assert "no cause was recorded" in page.text


def test_no_run_folder_says_which_is_near(tmp_path):
    make_run(tmp_path / "reverse")
    with pytest.raises(RunFolderError, match="did you mean 'reverse'"):
        rep.report_html(tmp_path / "revers")


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    run = make_run(tmp_path / "r")
    page = rep.write_report(run)
    before = page.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rep.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        rep.write_report(run)
    assert page.read_text() == before and sorted(p.name for p in run.iterdir() if "report" in p.name) == ["report.html"]


def test_long_runs_and_huge_files_stay_small(tmp_path):
    run = make_run(tmp_path / "r")
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "reward/mean": {math.sin(s / 3000)}, "loss": {s % 17}}}\n' for s in range(100_000)))
    (run / "rollouts" / "step_000002.jsonl").write_text("".join(json.dumps({"status": "error", "error": f"row {i} of {i * 7}", "prompt": "x" * 1000}) + "\n" for i in range(3000)))
    page = check(rep.report_html(run), limit=500_000)
    assert "3,000" in page.text and "row 0 of 0" in page.text  # one cause, whatever its numbers


def test_failures_are_counted_by_cause(tmp_path):
    run = rep.read_run(make_run(tmp_path / "r"))
    found, unread = rep.failures(run)
    assert [(f.cause, f.count, f.first, f.last) for f in found] == [("E1: plain", 2, 1, 40)] and unread == 0
    assert rep.failures(run, budget=10) == ([], 2)


def test_a_response_that_pretends_to_be_a_failure_is_not_counted(tmp_path):
    run = make_run(tmp_path / "r")
    (run / "rollouts" / "step_000001.jsonl").write_text(json.dumps({"response": '"status": "error"', "metrics": {"status": "failed"}, "status": "ok"}) + "\n")
    assert [f.count for f in rep.failures(rep.read_run(run))[0]] == [1]


def test_stored_rollouts_come_back_with_what_json_lacks(tmp_path):
    run = make_run(tmp_path / "r")
    found = Rollouts([Trajectory(tokens=[1, 2], loss_mask=[0, 1], logprobs=[0.0, math.nan], reward=0.5, prompt="q", response="NOT FINITE", group_id="0:0")])
    found.save(run / "rollouts" / "step_000001.jsonl")
    (stored,) = rep.read_jsonl(run / "rollouts" / "step_000001.jsonl")
    assert math.isnan(stored["logprobs"][1])
    page = check(rep.report_html(run))
    assert any("not finite" == a.get("title") for _, a in page.tags)
    (run / "rollouts" / "step_000001.jsonl").write_text('{"prompt": {"__nexrl__": "exec", "value": "x"}, "reward": {"__nexrl__": "float", "value": []}}\n')
    check(rep.report_html(run))


def test_figures_on_demand(tmp_path):
    run = make_run(tmp_path / "r")
    figure = rep.plot_metrics(run)
    assert [t.name for t in figure.data] == ["reward/mean", "val/reward/mean"] and list(figure.data[1].x) == [0, 40]
    figure = rep.plot_metrics([{"loss": 1.0}, {"loss": 0.5, "step": 9}], "loss")
    assert list(figure.data[0].x) == [1, 9]
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        rep.plot_metrics([{"loss": 1.0}], "los")


CONTRAST = """() => { const lum = c => { const v = c.map(x => { x /= 255; return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4 }); return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const mix = (c, under) => { canvas.fillStyle = `rgb(${under})`; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3) };
const page = mix(getComputedStyle(document.body).backgroundColor, [255, 255, 255]); let worst = [99, ''];
for (const e of document.querySelectorAll('.nx span,.nx dt,.nx dd,.nx td,.nx th,.nx p,.nx b,.nx h1,.nx h2,.nx a')) { if (!e.textContent.trim() || e.closest('svg,.nx-k,.arrow')) continue;
const a = lum(mix(getComputedStyle(e).color, page)), b = lum(page), r = (Math.max(a, b) + .05) / (Math.min(a, b) + .05); if (r < worst[0]) worst = [r, e.outerHTML.slice(0, 120)] } return worst }"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_in_a_browser(browser, tmp_path, theme, width):
    attack = '"><img src=x onerror="window.hit=1"><script>window.hit=1</script>'
    path = rep.write_report(make_run(tmp_path / "run", attack=attack))
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    seen: list[str] = []
    page.on("request", lambda q: seen.append(q.url) if not q.url.startswith("file:") else None)
    page.on("console", lambda m: seen.append(m.text))
    page.goto(path.as_uri())
    assert page.evaluate("window.hit") is None and page.evaluate("document.scripts.length + document.images.length") == 0
    assert seen == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.0, where
    page.close()


def test_a_card_in_a_page_without_a_policy(browser):
    attack = '"><img src=x onerror="window.hit=1"><script>window.hit=1</script></style><style>*{display:none}'
    t = {"prompt": attack, "response": attack, "status": "ok", "reward": 1.0, "group_id": attack, "error": attack, "ground_truth": attack}
    page = browser.new_page()
    page.set_content(str(rollouts_html([t])) + str(step_html(type("S", (), {"step": 1, "metrics": {attack: 1.0}, "rollouts": [t]})())))
    assert page.evaluate("window.hit") is None and page.evaluate("document.images.length") == 0
    assert page.evaluate("getComputedStyle(document.querySelector('.nx')).display") == "block"
    page.close()


def test_names_break_behind_their_punctuation(tmp_path):
    """`task.py:build_model` may break behind the colon; what is copied is unchanged."""
    (tmp_path / "recipe.yaml").write_text("experiment_name: x\nmodel:\n  builder: task.py:build_model\n  dtype: '<b>'\n")
    page = rep.report_html(tmp_path)
    assert "<dd>task.py:<wbr>build_<wbr>model</dd>" in page
    assert "task.py:build_model" in page.replace("<wbr>", "")
