# SPDX-License-Identifier: Apache-2.0
"""Each rule of lint fails on what it is for, and on nothing else."""

import shutil
from types import SimpleNamespace

import pytest
from fakes import BASE, edit, stops

from build_tools import lint as module
from build_tools.common import REPO

FIRST = "core/first.patch"
NEW = "transformer_engine/pytorch/module/_new.py"


@pytest.fixture
def work(template, tmp_path):
    """A copy of the small repository, beside a tree that is only read."""
    repo = tmp_path / "repo"
    shutil.copytree(template / "repo", repo)
    return SimpleNamespace(
        repo=repo,
        tree=template / "tree",
        patches=repo / "patches",
        overlay=repo / "transformer_engine",
    )


@pytest.fixture
def problems(work):
    """Problems of the small repository; after a look that it has none."""
    ask = lambda: module.lint(work.repo, work.tree)  # noqa: E731
    assert ask() == []
    return ask


def rewrite(work, change, name=FIRST):
    path = work.patches / name
    text = change(path.read_text())
    assert text != path.read_text()
    path.write_text(text)


def replaced(old, new):
    def change(text):
        assert old in text, old
        return text.replace(old, new, 1)

    return change


def hunk(*rows):
    """Replace the diff's rows."""

    def change(text):
        head, _, _ = text.partition("\n@@ ")
        old = sum(row[0] in " -" for row in rows)
        new = sum(row[0] in " +" for row in rows)
        return "\n".join([head, f"@@ -9,{old} +9,{new} @@", *rows, ""])

    return change


WIDE = "more than one line of context at @@ -9"
RULES = {
    "no-from": (replaced("From: te-wgrad", "X: te-wgrad"), "no From: header"),
    "no-date": (replaced("Date: ", "X: "), "no Date: header"),
    "no-subject": (replaced("Subject: ", "X: "), "no Subject: header"),
    "numbered": (replaced("Subject: ", "Subject: [PATCH 1/2] "), "the subject is numbered"),
    "no-symptom": (replaced("Symptom: ", "It is "), "no 'Symptom: ...' paragraph"),
    "no-cause": (replaced("Cause: ", "It is "), "no 'Cause: ...' paragraph"),
    "no-fix": (replaced("Fix: ", "It is "), "no 'Fix: ...' paragraph"),
    "no-status": (replaced("Upstream-Status: Pending\n", ""), "no Upstream-Status: trailer"),
    "no-base": (replaced("Upstream-Base: v2.20.2\n", ""), "no Upstream-Base: trailer"),
    "no-bug": (replaced("Bug: https://example.com/issues/1\n", ""), "no Bug: trailer"),
    "no-test": (replaced("Test: tests/", "X: tests/"), "no Test: trailer"),
    "no-exit": (replaced("Drop-When: ", "X: "), "no Drop-When: trailer"),
    "no-sign-off": (replaced("Signed-off-by: ", "X: "), "no Signed-off-by: trailer"),
    "trailers-above": (
        replaced("\n\ndiff --git", "\n\nMore text.\n\ndiff --git"),
        "no Signed-off-by: trailer",
    ),
    "sign-off": (replaced("A Person <person@", "person@"), "is not 'Name <mail>'"),
    "status": (replaced("Status: Pending", "Status: Soon"), "Upstream-Status: Soon is not one of"),
    "where": (replaced("Status: Pending", "Status: Submitted"), "Submitted does not say where"),
    "base": (replaced("Base: v2.20.2", "Base: v2.19.0"), "v2.19.0 is not the pinned v2.20.2"),
    "adds": (replaced("module/_new.py\n", "module/_old.py\n"), "_old.py does not exist"),
    "test-file": (replaced("test_new.py::", "test_old.py::"), "test_old.py does not exist"),
    "test-id": (replaced("::test_it", "::test_that"), "test_new.py has no test_that"),
    "test-prefix": (replaced("::test_it", "::test_i"), "test_new.py has no test_i"),
    "test-in-class": (replaced("::test_it", "::TestMore::test_no"), "has no TestMore::test_no"),
    "long": (hunk(" a", *["+x"] * 61, " b"), "61 changed lines, at most 60"),
    "empty": (hunk(" a"), "it changes nothing"),
    "blank-end": (hunk(" a", "+x ", " b"), "an added line ends in white space"),
    "tab-end": (hunk(" a", "+x\t", " b"), "an added line ends in white space"),
    "context-before": (hunk(" a", " a", "+x", " b"), WIDE),
    "context-after": (hunk(" a", "+x", " b", " b"), WIDE),
    "context-between": (hunk(" a", "+x", " b", " b", " b", "-y", " c"), WIDE),
    "elsewhere": (replaced("a/transformer_engine/", "a/qa/"), "is in no package"),
    "overlay": (replaced(f"a/{BASE}", f"a/{NEW}"), f"it changes {NEW}, an overlay file"),
    "new-file": (replaced("\nindex ", "\nnew file mode 100644\nindex "), "it adds a file"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_patch_that_breaks_one_rule(work, problems, rule):
    change, seen = RULES[rule]
    rewrite(work, change)
    found = problems()
    assert len([p for p in found if seen in p]) == 1, found
    assert all(p.startswith(f"patches/{FIRST}: ") for p in found if NEW + ":" not in p)
    assert len(found) == 1 or rule in ("trailers-above", "adds"), found


RIGHT = {
    "long-enough": hunk(" a", *["+x"] * 60, " b"),
    "two-between": hunk(" a", "+x", " b", " b", "-y", " c"),
    "no-context": hunk("+x"),
    "parameter": replaced("::test_it", "::test_it[a-b]"),
    "in-class": replaced("::test_it", "::TestMore::test_in"),
    "file-only": replaced("::test_it", ""),
    "where": replaced("Pending", "Submitted https://example.com/pull/2"),
    "plus-plus": hunk(" a", "+++x", "---y", " b"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_patch_that_is_right(work, problems, case):
    rewrite(work, RIGHT[case])
    assert problems() == []


def test_the_second_hunk_and_file_are_looked_at_too(work, problems):
    rewrite(work, lambda text: text + "@@ -30,3 +30,4 @@\n a\n b\n+c\n d\n")
    assert any("at @@ -30,3 +30,4 @@" in p for p in problems())


def test_a_patch_of_the_fork_needs_no_symptom_and_upstream_only_may_go_elsewhere(work, problems):
    for folder in ("fork", "upstream_only"):
        name = f"{folder}/first.patch"
        (work.patches / folder).mkdir()
        (work.patches / FIRST).rename(work.patches / name)
        rewrite(work, replaced("Symptom", "It"), name)
        edit(work.patches, "series", (FIRST, name))
        assert problems() == []
        rewrite(work, replaced("It:", "Symptom:"), name)
        edit(work.patches, "series", (name, FIRST))
        (work.patches / name).rename(work.patches / FIRST)
    rewrite(work, replaced("a/transformer_engine/", "a/qa/"))
    (work.patches / FIRST).rename(work.patches / name)
    edit(work.patches, "series", (FIRST, name))
    assert problems() == []


SERIES = {
    "twice": ("core/first.patch\ncore/first.patch\n", "core/first.patch is listed twice"),
    "missing": ("core/first.patch\ncore/gone.patch\n", "series: core/gone.patch does not exist"),
    "left-out": ("core/first.patch\n", "patches/core/second.patch: not in patches/series"),
    "alone": (
        "# alone: transformer_engine/gone.py\ncore/first.patch\ncore/second.patch\n",
        "'# alone: transformer_engine/gone.py' does not exist",
    ),
}


@pytest.mark.parametrize("case", SERIES)
def test_a_wrong_series(work, problems, case):
    text, seen = SERIES[case]
    (work.patches / "series").write_text(text)
    assert any(seen in p for p in problems())


def test_a_stray_file(work, problems):
    (work.patches / "core/first.patch.rej").write_text("x")
    assert problems() == ["patches/core/first.patch.rej: not a patch"]


@pytest.mark.parametrize("name", ["core/0001-first.patch", "core/First.patch", "core/a_b.patch"])
def test_a_wrong_name(work, problems, name):
    (work.patches / FIRST).rename(work.patches / name)
    edit(work.patches, "series", (FIRST, name))
    wrong = "the file name is not a lower-case slug without a number"
    assert problems() == [f"patches/{name}: {wrong}"]


def test_another_folder(work, problems):
    (work.patches / "misc").mkdir()
    (work.patches / FIRST).rename(work.patches / "misc/first.patch")
    edit(work.patches, "series", (FIRST, "misc/first.patch"))
    assert problems() == ["patches/misc/first.patch: not in one of core, perf, fork, upstream_only"]


HEADER = "# SPDX-License-Identifier: Apache-2.0\n"


def test_an_overlay_file_that_nothing_names(work, problems):
    path = work.overlay / "pytorch/alone.py"
    path.write_text(HEADER)
    assert problems() == [
        "transformer_engine/pytorch/alone.py: no patch names it in an Adds: trailer, nor "
        "patches/series"
    ]
    series = work.patches / "series"
    series.write_text("# alone: transformer_engine/pytorch/alone.py\n" + series.read_text())
    assert problems() == []


def test_an_overlay_file_without_a_license(work, problems):
    (work.repo / NEW).write_text("NEW = 1\n")
    assert problems() == [f"{NEW}: no SPDX-License-Identifier line at the top"]


@pytest.mark.parametrize(
    "folder, ours", [("notes", False), ("ours", True)], ids=["of-upstream", "of-ours"]
)
def test_no_init_in_a_folder_of_upstream(work, problems, folder, ours):
    # notes/ is upstream's and has no __init__.py there.
    name = f"transformer_engine/pytorch/{folder}/__init__.py"
    (work.repo / name).parent.mkdir()
    (work.repo / name).write_text(HEADER)
    series = work.patches / "series"
    series.write_text(f"# alone: {name}\n" + series.read_text())
    assert [name in p and "upstream owns that folder" in p for p in problems()] == [True] * (
        not ours
    )
    assert module.lint(work.repo, work.repo / "no-tree") == []


def test_two_tests_of_one_name(work, problems):
    (work.repo / "tests/pytorch/more").mkdir()
    (work.repo / "tests/pytorch/more/test_new.py").write_text("")
    assert any("has the same name" in p for p in problems())


def test_the_verb_lists_the_problems_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(module, "lint", lambda: ["patches/a: wrong", "patches/b: wrong"])
    with stops("2 problems:", "patches/a: wrong", "patches/b: wrong", next_step="CONTRIBUTING.md"):
        module.main(None)
    monkeypatch.setattr(module, "lint", lambda: [])
    module.main(None)
    assert "are right" in capsys.readouterr().err


def test_this_repository_is_right():
    assert module.lint(REPO) == []
