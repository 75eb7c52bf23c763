"""Files of the version before the rooms open and mean the same: runs, a study, skip configs.

They lie in fixtures/before; the tables there are those that version's report made of the files.
"""

import json
from pathlib import Path

import pandas as pd

from layerskip.analysis import report, write_report
from layerskip.config import DecodingOptions, SkipConfig

BEFORE = Path(__file__).parent / "fixtures" / "before"


def test_reports_of_files_from_before_have_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(report.plots, "run_plots", lambda run: [])
    monkeypatch.setattr(report.plots, "overview_plots", lambda runs: [])
    monkeypatch.setattr(report, "search_plots", lambda search: [])
    files = [BEFORE / name for name in ("run.jsonl", "gemma2.jsonl", "search.json")]
    write_report(files, tmp_path / "report")
    tables = {path.name for path in (BEFORE / "tables").iterdir()}
    found = {path.name for path in (tmp_path / "report" / "tables").iterdir()}
    assert found == tables | {"sources.csv"}
    # their drafts came from one source each
    assert not (tmp_path / "report" / "tables" / "sources.csv").read_text().strip()
    for name in tables:
        expected, found = (
            (folder / name).read_text().strip()
            for folder in (BEFORE / "tables", tmp_path / "report" / "tables")
        )
        if not expected:
            assert not found
            continue
        pd.testing.assert_frame_equal(
            pd.read_csv(tmp_path / "report" / "tables" / name),
            pd.read_csv(BEFORE / "tables" / name),
            rtol=1e-9,
            check_dtype=False,
        )


def test_skip_configs_from_before_are_read_the_same():
    config = SkipConfig.load(BEFORE / "skip.json")
    assert config == SkipConfig(attention=(3, 5, 9), mlp=(4, 9), exit_layer=20)
    assert (config.num_layers, config.model) == (24, "demo-llama")
    assert config.decoding == DecodingOptions(
        controller="expected-gain",
        max_draft_length=8,
        threshold=0.4,
        enabled=True,
        acceptance="rejection",
        draft_vocabulary=(7, 3, 2047),
    )
    assert config.costs["verify"] == [1.0, 1.18, 1.31]
    before = json.loads((BEFORE / "skip.json").read_text())
    assert config.to_dict() == {**before, "schema": 3}
    found = SkipConfig.load(BEFORE / "found-skip.json")
    assert found.decoding == DecodingOptions(enabled=False)
    assert found.notes["max_new_tokens"] == 16
