"""The documentation names things that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from umad.config import Recipe
from umad.recipe_io import _all_keys

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs/equations.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and "`tests/" in line
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip("`").rsplit(".", 1)[-1])
def test_each_equation_has_its_function_setting_and_test(row: list[str]) -> None:
    _, function, setting, test = row
    module, name = function.strip("`").rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))
    if setting != "–":
        assert setting.strip("`") in _all_keys(Recipe, "")
    file, _, test_name = test.strip("`").partition("::")
    assert f"def {test_name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_table_of_equations_is_read() -> None:
    assert len(ROWS) >= 13


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def code_blocks(page: Path) -> dict[str, str]:
    """Python blocks of a page by the file name in their first line."""
    blocks = re.findall(r"```python\n# (\w+\.py)(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return {name: f"# {rest}" for name, rest in blocks}


def test_the_reward_and_the_protocol_of_the_how_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from umad.config import RewardConfig
    from umad.debate.agents import Agent
    from umad.debate.driver import Driver, jobs_for
    from umad.debate.prompts import Prompts
    from umad.debate.protocols import load_protocol
    from umad.engines.scripted import ScriptedEngine
    from umad.grading import Grader
    from umad.learning.rewards import load_functions, reward_debate
    from umad.records import Problem, Sampling

    blocks = code_blocks(ROOT / "docs/howto.md")
    assert set(blocks) == {"my_rewards.py", "my_protocols.py"}
    for name, code in blocks.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    agents = [Agent(name, ScriptedEngine(lambda r: r"well \boxed{2}")) for name in "abc"]
    driver = Driver(agents, Prompts("compact"), Grader())
    jobs = jobs_for([Problem("p", "1+1", "2")], 1)
    debate = driver.run(jobs, load_protocol("module:my_protocols"), Sampling(9), 0, "test")[0]
    assert debate.error is None
    assert [len(r.saw) for r in debate.turns[0]] == [0, 1, 2]
    assert debate.cost.depth == 3
    config = RewardConfig.model_validate({"functions": [{"function": "my_rewards:short", "weight": 0.1}]})
    rewarded = reward_debate(debate, config, load_functions(config))
    assert rewarded.turns[0][0].parts["short"] == pytest.approx(0.1 * (1 - 2 / 100))
