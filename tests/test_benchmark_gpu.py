"""scripts/benchmark_gpu.py on a CPU: its table, its record, and the loop in gpt-fast's way."""

import json

import benchmark_gpu
import torch
from models import lively_model, prompt
from transformers import StaticCache

import layerskip

PARTS = ("runs", "shape of tiny", "server", "gpt-fast's way")
DIFFERENCES = ("ms between passes", "s more in the first call")  # of times, so of either sign


def test_the_table_and_the_record(tmp_path, monkeypatch, capsys):
    runs = {name: benchmark_gpu.RUNS[name] for name in ("smollm2-gpu-static", "demo-llama-gpu")}
    monkeypatch.setattr(benchmark_gpu, "RUNS", runs)
    output = tmp_path / "tiny.json"
    benchmark_gpu.main(["--device", "cpu", "--tiny", "--output", str(output)])
    record, printed = json.loads(output.read_text()), capsys.readouterr().out
    assert (record["device"], record["tiny"], record["left_out"]) == ("cpu", True, [])
    assert {row["part"] for row in record["rows"]} == {*PARTS}
    rows = [row for row in record["rows"] if row["figure"] not in DIFFERENCES]
    assert all(0 <= row["value"] < 1e6 for row in rows)
    for row in record["rows"]:
        assert f"{row['case']}  " in printed or f" {row['case']} " in printed
        assert row["figure"] in printed
    figures = {(row["case"], row["figure"]): row["value"] for row in record["rows"]}
    assert figures["smollm2-gpu-static", "generate-compiled / plain"] > 0
    assert figures["plain", "v(16)"] >= figures["plain", "v(2)"] > 0
    assert figures["4 bits", "x plain, computed for 0.95 accepted"] >= 1
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == {*runs}


def test_what_there_is_no_time_for_is_said(tmp_path, capsys):
    output = tmp_path / "none.json"
    benchmark_gpu.main(["--device", "cpu", "--tiny", "--minutes", "-1", "--output", str(output)])
    assert json.loads(output.read_text())["rows"] == []
    assert "no time for: runs, shapes, server, like_gpt_fast" in capsys.readouterr().out


def test_the_compiled_loop_writes_the_models_text():
    model = lively_model("llama")
    ids = torch.cat([prompt(6), prompt(6)], 1)
    plain = layerskip.generate(model, ids, enabled=False, max_new_tokens=20).sequences[0, 12:]
    step = benchmark_gpu.compiled(model, really=False)
    for drafted in (0, 5):
        cache = StaticCache(config=model.config, max_cache_len=12 + 20 + drafted + 1)
        for _ in range(2):
            text = benchmark_gpu.compiled_loop(model, step, cache, ids, 20, drafted)
            assert text == plain.tolist()
