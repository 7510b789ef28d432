"""`follow_overrides`: settings of single parameters, which optimizers of bitsandbytes keep by identity."""

from collections.abc import Iterable

from torch.optim import Optimizer

from lightning_cxl.optim.masters import WeightPair


def follow_overrides(optimizer: Optimizer, pairs: Iterable[WeightPair]) -> None:
    """Let settings of compute weights hold for their masters, such as the Trainer's: embeddings have 32-bit state.

    Args:
        optimizer: any; those of bitsandbytes share one manager of settings in a process.
        pairs: what the optimizer trains.
    """
    manager = getattr(optimizer, "mng", None)
    settings = getattr(manager, "pid2config", None)
    if manager is None or settings is None:
        return
    of_modules = {id(getattr(module, name)): found for module, name, found in manager.module_weight_config_triple}
    for pair in pairs:
        found = of_modules.get(id(pair.compute), settings.get(id(pair.compute)))
        if found is not None:
            settings[id(pair.master)] = found
