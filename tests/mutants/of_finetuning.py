"""Protections of the main job: what of a conversation is learned."""

from tests.mutants.mutant import Mutant

_CHAT = "lightning_cxl/finetune/chat.py"
_CONVERSATIONS = "lightning_cxl/finetune/conversations.py"
_LOADER = "lightning_cxl/finetune/loader.py"
_SAMPLES = "lightning_cxl/finetune/samples.py"
_DATA = "lightning_cxl/finetune/data.py"
T_CHAT = ("tests/unit/finetune/test_chat.py",)
T_CONVERSATIONS = ("tests/unit/finetune/test_conversations.py",)
T_DATA = ("tests/unit/finetune/test_data.py",)
T_LOADER = ("tests/unit/finetune/test_loader.py",)

MUTANTS = (
    Mutant(
        "an answer's header is not learned",
        _CHAT,
        "max(len(answer.before), _shared(answer.opened, answer.after))",
        "len(answer.before)",
        T_CHAT,
    ),
    Mutant(
        "an answer is looked for where the template shows it",
        _CHAT,
        "text.startswith(answer.after) and ",
        "",
        T_CHAT,
    ),
    Mutant(
        "what comes before an answer is its sample's beginning",
        _CHAT,
        " and answer.after.startswith(answer.before)",
        "",
        T_CHAT,
    ),
    Mutant("marks of a template are used", _CHAT, "if _MARKS.search(", "if None and _MARKS.search(", T_CHAT),
    Mutant("someone must answer", _CONVERSATIONS, 'message["role"] == "assistant" for', "True for", T_CONVERSATIONS),
    Mutant(
        "a weight is not passed over", _CONVERSATIONS, 'if message.get("weight", 1) != 1:', "if False:", T_CONVERSATIONS
    ),
    Mutant("padding has no labels", _LOADER, "padding_value=IGNORED", "padding_value=pad_id", T_LOADER),
    Mutant(
        "a first token, which nothing predicts, is no answer",
        _SAMPLES,
        "for label in labels[1:]",
        "for label in labels",
        ("tests/unit/finetune/test_samples.py",),
    ),
    Mutant("samples without an answer are left out", _SAMPLES, "samples.select(kept)", "samples", T_DATA),
    Mutant("an error in a line says where", _DATA, "raise error.located(files) from error", "raise", T_DATA),
)
