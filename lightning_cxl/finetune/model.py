"""`CausalLM`: a `transformers` causal language model as a LightningModule."""

import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_cxl.commands.export import FILES_KEY
from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.integrations.lightning import LightningModule, OptimizerLRScheduler
from lightning_cxl.sequences.chunked_loss import IGNORED, chunked_loss
from lightning_cxl.sequences.packing import lengths_of, packed_arguments, separate
from lightning_cxl.sharding.fsdp import gathered, is_cut
from lightning_cxl.weights.hf import from_pretrained, quantization_fields, with_adapters, without_code

_RNG_KEY = "causal_lm_rng"
Batch = dict[str, Tensor]


class CausalLM(LightningModule):
    """A Llama with random weights, or the model of `name_or_path` with its own weights.

    The Trainer's strategy decides where weights and optimizer state lie; the model is built in `configure_model`.
    Logged: `train_loss`, `lr` at every step; `val_loss` and `test_loss` over their whole sets.
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
        """Keep the options.

        Args:
            name_or_path: Hub id or local folder. None: a new Llama of the shape below, embeddings tied.
            vocab_size: Rows of the embedding; the command line fills it in from the data.
            hidden_size: Width; an even multiple of `num_heads`.
            num_layers: Number of decoder layers.
            num_heads: Attention heads.
            intermediate_size: Width of the gated MLP.
            attn: Attention implementation as `transformers` names it: "sdpa", "eager", "flash_attention_2".
            mapped: True: keep the weights of `name_or_path` in their files until the run moves them to their tiers.
                False: every process reads all of them before. None: True with several processes, False with one.
            lora: Train adapters alone: fields of ``peft.LoraConfig``. Checkpoints hold the adapters alone.
            quantization: Quantise the weights of `name_or_path` while they are read: "4bit" (NF4), "8bit", or fields of
                ``BitsAndBytesConfig``. Training needs `lora` then.
            lr: Highest learning rate, reached after the warm-up. None: 1e-3 for a new Llama, 1e-5 for the weights of
                `name_or_path`, 2e-4 for adapters.
            weight_decay: AdamW's, for matrices alone (not for norms and biases).
            warmup_steps: Optimizer steps of linear warm-up, before a cosine to a tenth of `lr`.
        """
        super().__init__()
        if lr is None:
            lr = 2e-4 if lora is not None else 1e-3 if name_or_path is None else 1e-5
        self.save_hyperparameters()
        self.options: Any = self.hparams
        sizes = vocab_size, hidden_size, num_layers, num_heads, intermediate_size
        if min(sizes) < 1 or min(lr, weight_decay, warmup_steps) < 0:
            given = dict(self.options)
            raise ConfigError(f"sizes must be at least 1, lr, weight_decay and warmup_steps not negative: {given}")
        if hidden_size % (2 * num_heads):
            raise ConfigError(f"hidden_size {hidden_size} must be an even multiple of num_heads {num_heads}")
        if lora is not None and name_or_path is None:
            raise ConfigError("lora needs a model to adapt: give name_or_path")
        self.strict_loading = lora is None  # checkpoints have adapters alone, see `on_load_checkpoint`
        self.model: Any = None
        self.tokenizer: Any = None
        self._seq_len = 0
        self._rng_states: dict[str, Tensor] = {}

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.options.quantization is not None and self.options.lora is None:
            raise ConfigError("quantised weights cannot be trained: give model.lora, such as {r: 16}")
        data = getattr(self.trainer, "datamodule", None)
        self.tokenizer, self._seq_len = getattr(data, "tokenizer", None), getattr(data, "seq_len", 0)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        model = self._build()
        config = model.config.get_text_config()
        if self.tokenizer is not None and len(self.tokenizer) > config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens, the model's embedding {config.vocab_size} rows: "
                "raise data.vocab_size or use the model's own tokenizer"
            )
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and self._seq_len > limit:
            raise ConfigError(f"data.seq_len {self._seq_len} is longer than the model's {limit} positions: lower it")
        self.model = (model if self.options.lora is None else with_adapters(model, self.options.lora)).train()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, name: str = "val_loss") -> None:
        scored = int((batch["labels"][:, 1:] != IGNORED).sum())  # the loss of a batch is their mean
        self.log(name, self._loss(batch), prog_bar=name == "val_loss", sync_dist=True, batch_size=scored)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx, "test_loss")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the most likely next token at every position, ``(batch, seq)``."""
        ids, packed, lengths = batch["input_ids"], self._packed(batch), []
        if packed is None:  # the model cannot keep samples apart: a row for each, and one for the padding behind them
            lengths = lengths_of(batch["position_ids"], padding_is_one=True).tolist()
            ids = nn.utils.rnn.pad_sequence([*torch.split(ids.flatten(), lengths)], batch_first=True)
        found: Tensor = self.model(input_ids=ids, use_cache=False, **(packed or {})).logits.argmax(dim=-1)
        if lengths:
            found = torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])
        return found.view_as(batch["input_ids"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        from transformers import get_scheduler  # imports peft and bitsandbytes, which evaluation does without

        total, options = self.trainer.estimated_stepping_batches, self.options
        if math.isinf(total):
            raise ConfigError("the cosine schedule needs an end: set trainer.max_steps or trainer.max_epochs")
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr, betas=(0.9, 0.95))
        shape = {"scheduler_specific_kwargs": {"min_lr_rate": 0.1}}
        # its checkpoints hold no length: a resumed run may have another one
        scheduler = get_scheduler("cosine_warmup_with_min_lr", optimizer, options.warmup_steps, int(total), **shape)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def generate_tokens(self, prompt: Tensor, *, max_new_tokens: int = 64) -> Tensor:
        """Return a prompt continued by sampling, always the same: int64 ``(all tokens,)`` for ``(prompt tokens,)``.

        Global random state and mode stay. All ranks call it. It ends where the settings of the model say.
        """
        model, kind = self.model, self.device.type
        ids, was_training = prompt[None].to(model.device), model.training
        options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": max_new_tokens}
        options["pad_token_id"] = self.tokenizer and self.tokenizer.eos_token_id
        options["synced_gpus"] = is_cut(self)  # all generate for as long as one has to
        devices = [] if kind == "cpu" else [self.device]
        with gathered(self), torch.random.fork_rng(devices, device_type=kind):
            torch.manual_seed(0)
            tokens: Tensor = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0]
        model.train(was_training)
        return tokens

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # config, tokenizer and adapter's config as texts by file name, so that the checkpoint can be exported alone
        own, adapters = self.model, getattr(self.model, "peft_config", None) or {}
        with tempfile.TemporaryDirectory() as folder:
            for part in filter(None, (own.config, own.generation_config, *adapters.values(), self.tokenizer)):
                part.save_pretrained(folder)
            texts = [path for path in Path(folder).iterdir() if path.suffix in (".json", ".jinja", ".txt")]
            checkpoint[FILES_KEY] = {path.name: path.read_text(encoding="utf-8") for path in texts}
        if self.options.lora is not None:
            trained, state = self._trained(), checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: value for name, value in state.items() if name in trained}
        # so that dropout continues exactly after a resume
        checkpoint[_RNG_KEY] = {kind: module.get_rng_state() for kind, module in self._random().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng_states = checkpoint.get(_RNG_KEY, {})
        if self.options.lora is None:
            return
        self.configure_model()  # done before, but for `load_from_checkpoint`
        given, own = checkpoint.get("hyper_parameters", {}).get("lora") or {}, self.options.lora
        different = checkpoint["state_dict"].keys() ^ self._trained()
        if different or {**given, "lora_dropout": 0} != {**own, "lora_dropout": 0}:  # would stay as they are
            raise CheckpointError(
                f"the checkpoint's adapters have lora={given}, those of this run lora={own} ({len(different)} names "
                "differ): give the model.lora that it was trained with; lora_dropout alone may change"
            )

    def on_train_start(self) -> None:
        for kind, module in self._random().items():
            if kind in self._rng_states:
                module.set_rng_state(self._rng_states[kind].cpu())
        self._rng_states = {}

    def _random(self) -> dict[str, Any]:
        return {self.device.type: torch.get_device_module(self.device), "cpu": torch}  # torch.cpu has no such state

    def _trained(self) -> set[str]:
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if parameter.requires_grad}

    def _packed(self, batch: Batch) -> dict[str, Any] | None:
        return packed_arguments(self.model, batch["position_ids"]) if "position_ids" in batch else {}

    def _loss(self, batch: Batch) -> Tensor:
        ids, labels, packed = batch["input_ids"], batch["labels"], self._packed(batch)
        if packed is None:
            ids, labels = separate(ids, labels, batch["position_ids"])
        with chunked_loss(self.model):
            loss: Tensor = self.model(input_ids=ids, labels=labels, use_cache=False, **(packed or {})).loss
        return loss

    def _build(self) -> Any:
        own, name = self.options, self.options.name_or_path
        options: dict[str, Any] = {"attn_implementation": own.attn, "dtype": torch.get_default_dtype()}
        has_files = name is not None and any(Path(name).glob("*.safetensors"))
        if (own.mapped or own.quantization is not None) and not has_files:
            more = "download a model first (hf download NAME --local-dir FOLDER)"
            raise ConfigError(f"mapped and quantization need a folder with safetensors, not {name!r}: {more}")
        if own.quantization is not None:
            options["quantization_config"] = quantization_fields(own.quantization, options["dtype"])
        try:
            if has_files:
                return from_pretrained(AutoModelForCausalLM, name, mapped=own.mapped, **options)
            if name is not None:
                return without_code(AutoModelForCausalLM.from_pretrained, name, **options)
            shape = {each: own[each] for each in ("vocab_size", "hidden_size", "intermediate_size")}
            shape |= {"num_hidden_layers": own.num_layers, "num_attention_heads": own.num_heads}
            eos = self.tokenizer and self.tokenizer.eos_token_id
            config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=eos, eos_token_id=eos)
            return AutoModelForCausalLM.from_config(config, **options)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ConfigError(f"cannot load {name or 'a new Llama'}: {type(error).__name__}: {error}") from error
