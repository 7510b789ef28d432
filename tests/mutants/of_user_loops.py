"""Protections of loops that users write: what front ends without a Trainer of Lightning's rely on."""

from tests.mutants.mutant import Mutant

_LOOP = "lightning_cxl/run/user_loop.py"
_FILES = "lightning_cxl/run/optimizer_files.py"
_FABRIC = "lightning_cxl/integrations/fabric/strategy.py"
_RUN = "tests/integration/test_fabric.py"
_HABITS = "tests/integration/test_loop_habits.py"
_OVERLAP = "tests/integration/test_loops_overlap.py"
T_FABRIC = (_RUN,)

MUTANTS = (
    Mutant(
        "the bad gradient is looked for before clipping",
        _FABRIC,
        "        self.offload.look()\n        norm = super().clip",
        "        norm = super().clip",
        T_FABRIC,
    ),
    Mutant(
        "new parameters take the place of old ones in optimizers",
        _LOOP,
        "            follow(names, model, optimizers)  # some",
        "            pass  # some",
        T_FABRIC,
    ),
    Mutant(
        "a run that could not adopt is ended",
        _LOOP,
        "            self._end(model, after_error=True)\n            raise\n",
        "            raise\n",
        T_FABRIC,
    ),
    Mutant(
        "models come back to the host",
        _LOOP,
        "            for each in self._prepared.values():\n"
        "                cleanup.callback(bring_to_host, each.model, self.device)\n",
        "",
        T_FABRIC,
    ),
    Mutant(
        "masters of a finished run are let go of",
        _LOOP,
        "            cleanup.callback(self.session.drop_finished)\n",
        "",
        T_FABRIC,
    ),
    Mutant(
        "parameters that join are adopted before the forward",
        _LOOP,
        "        self._run.adopt_joined()\n",
        "",
        T_FABRIC,
    ),
    Mutant(
        "foreign parameters are refused",
        _LOOP,
        "        if strange:\n",
        "        if False:\n",
        T_FABRIC,
    ),
    Mutant(
        "a file waits for updates that run behind",
        _FILES,
        "        self._run.wait_for_updates()\n",
        "",
        (_OVERLAP,),
    ),
    Mutant(
        "a file has the masters of its own optimizer only",
        _FILES,
        'own["master_weights"].items() if name in mine}',
        'own["master_weights"].items()}',
        T_FABRIC,
    ),
    Mutant(
        "masters come back from a file",
        _FILES,
        '        restore_masters(own.get("master_weights"), run.masters, [self._optimizer])\n',
        "",
        T_FABRIC,
    ),
    Mutant(
        "random rounding goes on where it was",
        _FILES,
        '        run.num_received = own.get("num_gradients", 0)\n',
        "",
        T_FABRIC,
    ),
    Mutant(
        "a file leaves the optimizer its own method",
        _FILES,
        "            self._optimizer.load_state_dict = self  # type: ignore[method-assign]\n",
        "            pass\n",
        T_FABRIC,
    ),
    Mutant(
        "a model that is moved is not placed before its optimizers come",
        _FABRIC,
        "register_forward_pre_hook(_WhenCalled(self))",
        "register_forward_pre_hook(_WhenCalled()); self._prepare(module)",
        T_FABRIC,
    ),
    Mutant(
        "a move of a model ends its run",
        _LOOP,
        "            loop._let_go(model)\n            warnings",
        "            warnings",
        ("tests/integration/test_hf_trainer_life.py::test_a_model_that_is_moved_away_is_plain",),
    ),
    Mutant(
        "a user's own zero_grad is called",
        "lightning_cxl/gradients/zero_grad.py",
        "set_to_none and self.own is None and",
        "set_to_none and",
        ("tests/unit/gradients/test_zero_grad.py",),
    ),
    Mutant(
        "a user's own zero_grad is put back",
        "lightning_cxl/gradients/zero_grad.py",
        "            if ours.own is not None:\n",
        "            if False:\n",
        ("tests/unit/gradients/test_zero_grad.py",),
    ),
    Mutant(
        "zero_grad waits for no update",
        "lightning_cxl/optim/cpu_adam.py",
        '                drop_gradients(group["params"])\n',
        '                for parameter in group["params"]:\n                    parameter.grad = None\n',
        (_OVERLAP,),
    ),
    Mutant(
        "zero_grad waits for gradients that are on their way",
        "lightning_cxl/optim/awaited_params.py",
        "        parameters.complete()\n",
        "        pass\n",
        (_OVERLAP,),
    ),
    Mutant(
        "weights are copied again for the next evaluation",
        _LOOP,
        "            self._run.code_has_run()\n",
        "            pass\n",
        (f"{_HABITS}::test_weights_changed_between_evaluations",),
    ),
    Mutant(
        "models that share parameters are refused",
        _LOOP,
        "            if shared:\n",
        "            if False:\n",
        (f"{_HABITS}::test_models_that_share_parameters_are_refused",),
    ),
)
