"""The table of predicted scaling: its rows, what must hold in it, and that it says what it is."""

import json
from pathlib import Path

import pytest
from scaling import main, scaling, table

from lightning_cxl.commands.plan import PlannedModel, Settings
from lightning_cxl.machine.speeds import load_machine
from tests.integration.llama import tiny_llama

EIGHT = load_machine(Path(__file__).resolve().parents[3] / "examples" / "machines" / "eight_gpus.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4, vocab_size=512, hidden_size=256, intermediate_size=768).config.save_pretrained(folder)
    return str(folder)


def test_every_number_of_gpus_has_a_row_and_several_machines_have_two(folder):
    rows = scaling(PlannedModel(folder), Settings(sequence=256), EIGHT, (1, 4, 8, 12, 16, 32))
    assert [(row.num_gpus, row.num_machines, row.between_nodes) for row in rows] == [
        (1, 1, ""),
        (4, 1, ""),
        (8, 1, ""),
        (16, 2, "replicate"),
        (16, 2, "shard"),
        (32, 4, "replicate"),
        (32, 4, "shard"),
    ]
    assert rows[0].efficiency == 1 and rows[0].received_bytes == 0
    for row in rows:
        assert row.tokens_per_s == pytest.approx(256 * row.num_gpus / row.seconds)
        assert row.efficiency == pytest.approx(row.tokens_per_s / row.num_gpus / rows[0].tokens_per_s)
    assert rows[3].host_bytes == rows[2].host_bytes == rows[5].host_bytes > rows[4].host_bytes > rows[6].host_bytes
    cells = table(rows)
    assert len({len(row) for row in cells}) == 1 and cells[1][:3] == ("1", "1", "-")


def test_the_script_says_that_it_predicts(folder, tmp_path, capsys):
    target = tmp_path / "rows.json"
    main(["--model", folder, "--seq", "256", "--quick", "--json", str(target)])
    shown, written = capsys.readouterr().out, json.loads(target.read_text())
    assert "predicted, not measured" in shown and written["note"] == "predicted, not measured"
    assert [row["num_gpus"] for row in written["rows"]] == [1, 16, 16]
