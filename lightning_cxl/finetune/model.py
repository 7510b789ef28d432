"""`CausalLM`: a `transformers` causal language model as a LightningModule."""

import contextlib
import functools
import math
import time
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_cxl.commands.export.layouts import FILES_KEY
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.finetune.loader import Batch, scored_tokens
from lightning_cxl.finetune.own_files import own_files
from lightning_cxl.finetune.saved_adapters import check_saved, trained_names
from lightning_cxl.integrations.lightning.lightning_api import LightningModule, OptimizerLRScheduler
from lightning_cxl.sequences.attention import packed_arguments, separate
from lightning_cxl.sequences.chunked_loss import chunked_loss
from lightning_cxl.sharding.fsdp import gathered, is_cut
from lightning_cxl.weights.hf import from_pretrained, quantization_fields, with_adapters, without_code

_RNG_KEY = "causal_lm_rng"


class CausalLM(LightningModule):
    """A Llama with random weights, or the model of `name_or_path` with its own weights.

    Nothing here knows how or where weights and optimizer state are stored: that is the Trainer's strategy. The
    model is built in `configure_model`, inside the strategy's context.

    Logged: `train_loss`, `tokens_per_s`, `lr` at every step; `val_loss` and `test_loss` over their whole sets.
    """

    def __init__(
        self,
        name_or_path: str | None = None,
        *,
        vocab_size: int = 8192,
        hidden_size: int = 512,
        num_layers: int = 6,
        num_heads: int = 8,
        intermediate_size: int = 1408,
        attn: str = "sdpa",
        mapped: bool | None = None,
        lora: dict[str, Any] | None = None,
        quantization: Literal["4bit", "8bit"] | dict[str, Any] | None = None,
        lr: float | None = None,
        weight_decay: float = 0.1,
        warmup_steps: int = 10,
    ) -> None:
        """Remember the options; the model itself is built in `configure_model`.

        Args:
            name_or_path: Hub id or local folder. None: a new Llama of the shape below, embeddings tied.
            vocab_size: Rows of the embedding; the command line fills it in from the data.
            hidden_size: Width; a multiple of `num_heads`.
            num_layers: Number of decoder layers.
            num_heads: Attention heads.
            intermediate_size: Width of the gated MLP.
            attn: Attention implementation as `transformers` names it: "sdpa", "eager", "flash_attention_2".
            mapped: True: leave the weights of `name_or_path` in their files until the run moves them to their tiers.
                False: every process reads all of them before. None: True with several processes, False with one.
            lora: Train adapters alone: fields of ``peft.LoraConfig``, such as ``{"r": 16, "lora_alpha": 32,
                "target_modules": "all-linear"}``. Checkpoints hold the adapters alone.
            quantization: Quantise the weights of `name_or_path` while they are read: "4bit" (NF4), "8bit", or fields of
                ``BitsAndBytesConfig``. Training needs `lora` then.
            lr: Highest learning rate, reached after the warm-up. None: 1e-3 for a new Llama, 1e-5 for the weights of
                `name_or_path`, 2e-4 for adapters.
            weight_decay: AdamW's, for matrices alone (not for norms and biases).
            warmup_steps: Optimizer steps of linear warm-up, before a cosine to a tenth of `lr`.

        Raises:
            ConfigError: a size or rate that makes no sense, files that cannot be mapped, or `hidden_size` is no even
                multiple of `num_heads`.
        """
        super().__init__()
        if mapped and (name_or_path is None or not _has_safetensors(name_or_path)):
            raise ConfigError(
                f"mapped=True needs a local folder with safetensors files as name_or_path, got {name_or_path!r}"
            )
        if lora is not None and name_or_path is None:
            raise ConfigError("lora needs a model to adapt: give name_or_path")
        if quantization is not None:
            quantization_fields(quantization, torch.get_default_dtype())  # refuses what it does not know
            if name_or_path is None or not _has_safetensors(name_or_path):
                raise ConfigError(
                    f"quantization needs a local folder with safetensors files as name_or_path, got {name_or_path!r}: "
                    "download a model first (hf download NAME --local-dir FOLDER)"
                )
        if lr is None:
            lr = 2e-4 if lora is not None else 1e-3 if name_or_path is None else 1e-5
        counts = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "intermediate_size": intermediate_size,
        }
        if min(counts.values()) < 1 or min(lr, weight_decay, warmup_steps) < 0:
            given = {**counts, "lr": lr, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
            raise ConfigError(
                f"sizes of a model must be at least 1, and lr, weight_decay and warmup_steps not negative; got {given}"
            )
        if hidden_size % num_heads or (hidden_size // num_heads) % 2:
            raise ConfigError(
                f"hidden_size {hidden_size} must be an even multiple of num_heads {num_heads} (rotary embeddings)"
            )
        self.save_hyperparameters()
        self.name_or_path = name_or_path
        self.attn = attn
        self.mapped = mapped
        self.lora = None if lora is None else dict(lora)
        self.quantization = quantization
        self.strict_loading = lora is None  # checkpoints have adapters alone, see `on_load_checkpoint`
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.shape = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "intermediate_size": intermediate_size,
        }
        self.model: PreTrainedModel | Any = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._seq_len = 0
        self._batch_began = 0.0
        self._rng_states: dict[str, Tensor] | None = None

    def setup(self, stage: str) -> None:
        """Take the tokenizer and the block length from the data module, when it has them.

        Raises:
            ConfigError: quantised weights are to be trained.
        """
        if stage == "fit" and self.quantization is not None and self.lora is None:
            raise ConfigError("quantised weights cannot be trained: give model.lora, such as {r: 16}")
        data = getattr(self.trainer, "datamodule", None)
        self.tokenizer = getattr(data, "tokenizer", None)
        self._seq_len = getattr(data, "seq_len", 0)

    def configure_model(self) -> None:
        """Build the model, once.

        Raises:
            ConfigError: no such model, or it does not fit the tokenizer or the block length.
        """
        if self.model is not None:
            return
        model = self._new_llama() if self.name_or_path is None else self._pretrained(self.name_or_path)
        _check_fit(model.config, self.tokenizer, self._seq_len)
        self.model = (model if self.lora is None else with_adapters(model, self.lora)).train()

    def forward(self, input_ids: Tensor, **arguments: Any) -> Tensor:
        """Return logits ``(batch, seq, vocab)`` for token ids ``(batch, seq)``; `arguments` are for the model."""
        return cast(Tensor, self._built()(input_ids=input_ids, use_cache=False, **arguments).logits)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean loss over the batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the mean loss over the tokens of the set that have labels as `val_loss`."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=scored_tokens(batch))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the mean loss over the tokens of the set that have labels as `test_loss`."""
        self.log("test_loss", self._loss(batch), sync_dist=True, batch_size=scored_tokens(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely next token at every position, ``(batch, seq)``."""
        positions = batch.get("position_ids")
        arguments = {} if positions is None else packed_arguments(self._built(), positions) or {}
        return cast(Tensor, self(batch["input_ids"], **arguments).argmax(dim=-1))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Start the clock of `tokens_per_s`."""
        self._batch_began = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log `tokens_per_s`: this process, forward to optimizer step, without data loading and validation."""
        seconds = time.perf_counter() - self._batch_began
        self.log("tokens_per_s", batch["input_ids"].numel() / seconds, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return a plain AdamW (matrices decayed, vectors not) and its schedule, stepped per optimizer step.

        Raises:
            ConfigError: the Trainer has no end, which the cosine needs.
        """
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ConfigError("the cosine schedule needs an end: set trainer.max_steps or trainer.max_epochs")
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr, betas=(0.9, 0.95))
        # a partial, not an object with state: a resumed run may have another length
        factor = functools.partial(cosine_factor, warmup_steps=self.warmup_steps, total_steps=int(total_steps))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def generate_text(self, prompt: str, *, max_new_tokens: int = 64, seed: int = 0) -> str:
        """Return `prompt` continued by sampling; leaves global random state and modes as they were. All ranks call it.

        Raises:
            ConfigError: no tokenizer is known (the module was not set up with `TextData`).
        """
        if self.tokenizer is None:
            raise ConfigError(
                "generate_text needs a tokenizer: set module.tokenizer, or run under a Trainer with TextData"
            )
        encoded = self.tokenizer(prompt, return_tensors="pt")
        tokens = self.generate_tokens(encoded["input_ids"][0], max_new_tokens=max_new_tokens, seed=seed)
        return cast(str, self.tokenizer.decode(tokens, skip_special_tokens=True))

    def generate_tokens(self, prompt: Tensor, *, max_new_tokens: int = 64, seed: int = 0) -> Tensor:
        """Return what `generate_text` does as tokens: int64 ``(prompt and new tokens,)`` for ``(prompt tokens,)``."""
        model = self._built()
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        # chat models have a token of their own for the end of an answer, which their tokenizer may not know
        own = model.generation_config.eos_token_id
        ends = {eos, *(own if isinstance(own, list) else [own])} - {None}
        options = {
            "do_sample": True,
            "temperature": 0.8,
            "top_k": 20,
            "pad_token_id": eos,
            "eos_token_id": sorted(ends) or None,
            "synced_gpus": is_cut(self),  # each process then generates for as long as one has to
        }
        modes = {module: module.training for module in model.modules()}
        devices = [] if self.device.type == "cpu" else [self.device]
        ids = prompt[None].to(model.device)
        with gathered(self), torch.no_grad(), torch.random.fork_rng(devices, device_type=self.device.type):
            torch.manual_seed(seed)
            model.eval()
            try:
                tokens = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options
                )
            finally:
                for module, training in modes.items():
                    module.training = training
        return cast(Tensor, tokens[0])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the random states, so that dropout continues exactly after a resume, and what an export needs."""
        checkpoint[FILES_KEY] = own_files(self._built(), self.tokenizer)
        if self.lora is not None:
            trained, state = trained_names(self), checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if name in trained}
        checkpoint[_RNG_KEY] = {"cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            checkpoint[_RNG_KEY][self.device.type] = torch.get_device_module(self.device).get_rng_state(self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random states until training starts.

        Raises:
            CheckpointError: its adapters are not those of this module.
        """
        if self.lora is not None:
            self.configure_model()  # done before, but for `load_from_checkpoint`
            given = checkpoint.get("hyper_parameters", {}).get("lora")
            check_saved(checkpoint["state_dict"], trained_names(self), given, self.lora)
        self._rng_states = checkpoint.get(_RNG_KEY)

    def on_train_start(self) -> None:
        """Restore the random states of the checkpoint, if the run resumes from one."""
        states, self._rng_states = self._rng_states, None
        if states is None:
            return
        torch.set_rng_state(states["cpu"].cpu())
        if self.device.type in states and self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states[self.device.type].cpu(), self.device)

    def _built(self) -> Any:
        """Return the model; `transformers` has no types that a strict check accepts."""
        assert self.model is not None, "configure_model() comes first"
        return self.model

    def _loss(self, batch: Batch) -> Tensor:
        model, ids, labels, arguments = self._built(), batch["input_ids"], batch["labels"], {}
        if "position_ids" in batch:
            packed = packed_arguments(model, batch["position_ids"])
            if packed is None:
                ids, labels = separate(ids, labels, batch["position_ids"])
            else:
                arguments = packed
        with chunked_loss(model):
            return cast(Tensor, model(input_ids=ids, labels=labels, use_cache=False, **arguments).loss)

    def _new_llama(self) -> PreTrainedModel:
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        config = LlamaConfig(**self.shape, tie_word_embeddings=True, bos_token_id=eos, eos_token_id=eos)
        try:
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=self.attn, dtype=torch.get_default_dtype()
            )
        except (ValueError, ImportError) as error:
            raise ConfigError(f"no Llama can be made with attn {self.attn!r}: {error}") from error

    def _pretrained(self, name_or_path: str) -> PreTrainedModel:
        options: dict[str, Any] = {"attn_implementation": self.attn, "dtype": torch.get_default_dtype()}
        if self.quantization is not None:
            options["quantization_config"] = quantization_fields(self.quantization, options["dtype"])
        must_be_ours = self.mapped or self.quantization is not None
        try:
            if _has_safetensors(name_or_path):
                # quantized, or experts that must be merged
                with contextlib.nullcontext() if must_be_ours else contextlib.suppress(UnsupportedError):
                    return from_pretrained(AutoModelForCausalLM, name_or_path, mapped=self.mapped, **options)
            return without_code(AutoModelForCausalLM.from_pretrained, name_or_path, **options)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"cannot load {name_or_path!r} (a local folder or a hub id): {type(error).__name__}: {error}"
            ) from error


def _has_safetensors(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def cosine_factor(step: int, *, warmup_steps: int, total_steps: int, floor: float = 0.1) -> float:
    """Return the factor on the learning rate at optimizer step `step` (from 0): linear up, cosine down to `floor`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def _check_fit(config: Any, tokenizer: PreTrainedTokenizerBase | None, seq_len: int) -> None:
    """Raise ConfigError where ids or positions would fall outside the model's tables."""
    config = config.get_text_config()
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {config.vocab_size} rows: "
            "raise model.vocab_size or use the model's own tokenizer"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and seq_len > limit:
        raise ConfigError(f"data.seq_len {seq_len} is longer than the model's {limit} positions: lower it")
