"""The table of quality: its rows, texts, goals and figure; and two rows of a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import plots, quality


def rows(**perplexities: float) -> list[dict[str, Any]]:
    """Rows of the table for one scheme, with these perplexities by method."""
    found: list[dict[str, Any]] = [
        {"method": "float", "weights": "float32", "perplexity": 10.0, "bits_per_weight": 32.0, "uncertainty": 0.0}
    ]
    for name, perplexity in perplexities.items():
        found.append(
            {
                "method": name,
                "weights": quality.GOAL_WEIGHTS,
                "perplexity": perplexity,
                "bits_per_weight": 4.125,
                "uncertainty": 0.03,
                "divergence": 0.1,
                "seconds": 1.0,
            }
        )
    return found


def test_every_row_is_listed_once() -> None:
    keys = [(entry.name, entry.weights) for entry in quality.entries()]
    assert len(set(keys)) == len(keys)
    for method in ("rtn", "gptq", "awq"):
        schemes = {weights for name, weights in keys if name == method}
        assert {f"int4 {g} {s}" for g in ("g32", "g64", "g128", "channel") for s in ("sym", "asym")} < schemes
        assert "int8 channel sym" in schemes
    assert {"float", "imported", "w8a8", "smoothquant", "blockwise"} < {name for name, _ in keys}
    assert {
        ("fp8", "e4m3 channel, e4m3 activations"),
        ("blockwise-fp8", "e4m3 blocks of 128, e4m3 activations"),
        ("mxfp4", "e2m1 g32, float8_e8m0fnu scales"),
        ("nvfp4", "e2m1 g16, float8_e4m3fn scales"),
    } < set(keys)
    assert ("gptq", quality.GOAL_WEIGHTS) in keys
    assert sum(name == quality.HEAD for name, _ in keys) == 2


def test_no_paragraph_is_in_both_texts() -> None:
    calibration, held_out = quality.texts()
    pieces = [{part for part in text.split("\n\n") if len(part) > 40} for text in (calibration, held_out)]
    assert not pieces[0] & pieces[1]
    assert min(len(calibration), len(held_out)) > 100_000


@pytest.mark.parametrize(
    ("gptq", "missed"), [(12.9, []), (13.1, [f"gptq, {quality.GOAL_WEIGHTS}"]), (7.1, []), (6.9, 1)]
)
def test_goals(gptq: float, missed: Any) -> None:
    found = quality.failures(rows(rtn=14.0, gptq=gptq))
    assert found == missed or len(found) == missed
    (row,) = (row for row in quality.compared(rows(rtn=14.0, gptq=gptq)) if row["method"] == "gptq")
    assert row["increase"] == gptq - 10
    assert row["saved"] == 1 - abs(gptq - 10) / 4


def elsewhere(**perplexities: float) -> list[dict[str, Any]]:
    return [{**row, "weights": "int8 channel sym"} if row["method"] != "float" else row for row in rows(**perplexities)]


def test_elsewhere_rtn_is_not_to_be_beaten_but_met() -> None:
    found = elsewhere(rtn=14.0, awq=14.0)
    assert quality.failures(found) == []
    found[-1]["perplexity"] = 14.0 + 1.1 * 0.03 * 2**0.5  # both standard errors
    assert quality.failures(found) == ["awq, int8 channel sym"]
    found[-1]["perplexity"] = 14.0 + 0.9 * 0.03 * 2**0.5
    assert quality.failures(found) == []
    found[-1]["divergence"] = 0.1001
    assert quality.failures(found) == ["awq, int8 channel sym"]


def test_nothing_is_saved_of_what_chance_explains() -> None:
    for rtn, told in ((10.08, False), (10.09, True)):
        (awq,) = (row for row in quality.compared(elsewhere(rtn=rtn, awq=10.01)) if row["method"] == "awq")
        assert ("saved" in awq) == told
        assert awq["goal_ok"]


def test_rows_are_kept_for_the_same_settings(tmp_path: Path) -> None:
    path, settings = tmp_path / "results" / "quality.json", quality.Settings(tokens=1024)
    assert quality.cached(path, settings) == []
    quality.save(rows(rtn=14.0), settings, path)
    assert quality.cached(path, settings) == rows(rtn=14.0)
    assert quality.cached(path, quality.Settings()) == []
    quality.save([*rows(rtn=14.0), {"method": "imported", "weights": "a name of before"}], settings, path)
    assert quality.cached(path, settings) == rows(rtn=14.0)
    wanted = [entry for entry in quality.entries() if (entry.name, entry.weights) == ("rtn", quality.GOAL_WEIGHTS)]
    assert list(quality.run(settings, wanted, rows(rtn=14.0), tmp_path)) == []


def narrow_and_wide() -> list[dict[str, Any]]:
    """Rows of more methods, with weights of both widths."""
    names = [name for name in dict.fromkeys(entry.name for entry in quality.entries()) if name != "float"]
    return [
        {"method": name, "weights": "int", "bits_per_weight": bits, "perplexity": 15.0 + place}
        for place, name in enumerate(names)
        for bits in (4.25, 8.01)
    ]


def test_table_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    report = quality.report(rows(rtn=14.0, gptq=12.0), quality.Settings())
    text = report.markdown()
    assert "| gptq |" in text
    assert "12.000" in text
    assert "50%" in text
    assert "PASS" in text
    total = len(quality.entries())
    assert f"{total - 3} of {total} rows are not measured yet" in text
    figures: list[Any] = []
    with monkeypatch.context() as context:
        context.setattr(plots, "_save", lambda figure, path: figures.append(figure))
        plots.draw_quality([*report.rows, *narrow_and_wide()], tmp_path / "quality.png")
    assert [axes.get_title() for axes in figures[0].axes] == ["4-bit weights", "8-bit weights"]
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert "imported (the 4-bit groups of the source file, untouched)" in texts
    styles = {(line.get_color(), line.get_marker()) for line in figures[0].legends[0].get_lines()}
    assert len(styles) == len({color for color, _ in styles}) == len(texts)  # no colour means two methods
    plots.draw_quality(report.rows, tmp_path / "new" / "quality.png")
    assert (tmp_path / "new" / "quality.png").read_bytes()[:4] == b"\x89PNG"
