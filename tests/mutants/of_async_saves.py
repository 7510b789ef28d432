"""Protections of checkpoints that are written while training goes on."""

from tests.mutants.mutant import Mutant

_SAVES = "lightning_cxl/run/async_save.py"
_STRATEGY = "lightning_cxl/integrations/lightning/strategy.py"
_TEST = "tests/distributed/test_async_saves.py"
_T_VALUES = (f"{_TEST}::test_training_goes_on_and_a_resume_is_exact",)
_T_REMOVED = (f"{_TEST}::test_the_last_checkpoint_stays_until_the_next_one_is_complete",)

MUTANTS = (
    Mutant("a late checkpoint has tensors of its step", _SAVES, 'own.to("cpu", copy=True)', 'own.to("cpu")', _T_VALUES),
    Mutant(
        "a late checkpoint has what is no tensor of its step",
        _SAVES,
        "lambda file: file.write(pickled.getbuffer())",
        "lambda file: torch.save(dict(rest), file)",
        _T_VALUES,
    ),
    Mutant(
        "the last checkpoint stays until a late one is complete",
        _SAVES,
        "        self._last = self._thread.submit(after)\n",
        "        step()\n",
        _T_REMOVED,
    ),
    Mutant(
        "the last checkpoint stays where a late one fails",
        _SAVES,
        "            before.result()\n            step()\n",
        "            try:\n                before.result()\n            finally:\n                step()\n",
        _T_REMOVED,
    ),
    Mutant(
        "an exception waits for a late checkpoint",
        _STRATEGY,
        "            cleanup.callback(self._close_saves, after_error=after_error)\n",
        "",
        (f"{_TEST}::test_who_raises_waits",),
    ),
)
