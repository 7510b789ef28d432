import pytest

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.finetune.cli import FitSummary
from lightning_cxl.finetune.model import CausalLM
from tests.unit.finetune.conftest import SHAPE


def test_losses_are_those_of_the_whole_validation_set_before_and_after(tiny_model, data, make_trainer):
    summary = FitSummary(max_new_tokens=8)
    trainer = make_trainer(max_steps=6, num_sanity_val_steps=-1, val_check_interval=3, callbacks=[summary])
    tiny_model.configure_model()
    fresh = make_trainer().validate(tiny_model, data, verbose=False)[0]["val_loss"]
    trainer.fit(tiny_model, data)
    after = make_trainer().validate(tiny_model, data, verbose=False)[0]["val_loss"]
    assert summary.before == fresh > after
    text = summary.describe(trainer)
    assert f"before {fresh:.4f}, after {after:.4f} (step 6)" in text
    assert f"sample:\n{summary.sample}" in text
    assert summary.sample.startswith(data.tokenizer.decode(data.held_out(1)[0][0]))
    assert "peak host memory" in text


def test_a_resumed_run_knows_the_first_loss(tiny_model, data, make_trainer, tmp_path):
    first = FitSummary()
    trainer = make_trainer(max_steps=2, num_sanity_val_steps=-1, callbacks=[first])
    trainer.fit(tiny_model, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    second = FitSummary()
    resumed = make_trainer(max_steps=4, num_sanity_val_steps=-1, val_check_interval=4, callbacks=[second])
    resumed.fit(CausalLM(**SHAPE), data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert second.before == first.before is not None
    assert second.after.endswith("(step 4)")


def test_what_was_removed_says_what_to_do_instead():
    with pytest.raises(ConfigError, match=r"this option was removed.*generate_tokens"):
        FitSummary("def ")
    with pytest.raises(UnsupportedError, match=r"generate_text was removed.*generate_tokens"):
        CausalLM(**SHAPE).generate_text("def ", max_new_tokens=4)
