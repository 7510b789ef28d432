"""Under a cluster's scheduler: Lightning's own signals, requeueing and resuming work, as without the strategy."""

import os
import signal

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch import seed_everything
from lightning.pytorch.trainer.connectors import signal_connector

from tests.integration.training import make_trainer
from tests.models import Task, TinyTransformer, token_data

SLURM = {
    "SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "fine-tune", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
}  # fmt: skip


@pytest.fixture
def slurm(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    commands = []
    monkeypatch.setattr(signal_connector, "call", lambda command: commands.append(command) or 0)
    return commands


class Signalled(Task):
    """The scheduler says at the third step that time is up."""

    def on_train_batch_end(self, *_):
        if self.global_step == 3:
            assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "it would end this process"
            os.kill(os.getpid(), signal.SIGUSR1)
            self.trainer.should_stop = True


def fit(task, folder, strategy="cxl_offload", steps=6):
    seed_everything(3, verbose=False)
    module = task(TinyTransformer(dropout=0.0))
    trainer = make_trainer(strategy, max_steps=steps, default_root_dir=folder)
    trainer.fit(module, token_data())
    return module, trainer


def test_slurm_saves_requeues_and_resumes(tmp_path, slurm):
    before = signal.getsignal(signal.SIGUSR1)
    _, trainer = fit(Signalled, tmp_path)
    assert isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
    assert slurm == [["scontrol", "requeue", "1234"]]
    assert [path.name for path in tmp_path.iterdir()] == ["hpc_ckpt_1.ckpt"]
    assert signal.getsignal(signal.SIGUSR1) == before
    resumed, trainer = fit(Task, tmp_path)
    assert trainer.global_step == 6 and len(resumed.losses) == 3


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_one_of_several_tasks_is_on_its_own_as_with_plain_lightning(tmp_path, slurm, monkeypatch, launcher):
    """The strategy drives one device: it is rank 0 of 1, and writes its checkpoint, whatever its task's number is."""
    if launcher == "srun":
        ranks = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    else:
        ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    for strategy in ("auto", "cxl_offload"):
        _, trainer = fit(Task, tmp_path / strategy, strategy, steps=1)
        expected = SLURMEnvironment if launcher == "srun" else TorchElasticEnvironment
        assert isinstance(trainer._accelerator_connector.cluster_environment, expected)
        ranks = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
        assert ranks == (0, 0, 0, 1) and trainer.is_global_zero
        trainer.save_checkpoint(tmp_path / strategy / "one.ckpt")
        assert (tmp_path / strategy / "one.ckpt").exists()
