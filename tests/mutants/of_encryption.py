"""Protections of encrypted state on SSD: the key, what windows show, and who may see values."""

from tests.mutants.mutant import Mutant

_RECORD = "lightning_cxl/storage/record.py"
_WINDOW = "lightning_cxl/storage/window.py"
_VEIL = "lightning_cxl/storage/veil.py"
_KEY = "lightning_cxl/storage/key.py"
_OPTIONS = "lightning_cxl/ssd_options.py"
_RECORDS = "lightning_cxl/optim/state_records.py"
_VISITS = "lightning_cxl/optim/state_visits.py"
_STATE = "lightning_cxl/optim/parameter_state.py"
T_CIPHER = ("tests/unit/storage/test_cipher.py",)
T_KEY = ("tests/unit/storage/test_key.py",)
T_STATE = ("tests/unit/optim/test_encrypted_state.py",)
T_RUN = ("tests/integration/test_encrypted_ssd.py",)

MUTANTS = (
    # -- windows
    Mutant(
        "encrypted bytes are no zeros",
        _WINDOW,
        "        if self._veil is None:\n            self._mapping.hide",
        "        if True:\n            self._mapping.hide",
        T_CIPHER,
    ),
    Mutant(
        "an encrypted window is in no file",
        _WINDOW,
        "        if veil is None:\n            _shown",
        "        if True:\n            _shown",
        T_STATE,
    ),
    Mutant(
        "a veil covers all of a window",
        _VEIL,
        "range(0, mapping.nbytes, self._nbytes)",
        "range(0, 1)",
        T_CIPHER,
    ),
    Mutant(
        "a veil takes few ranges of addresses",
        _VEIL,
        "max(_LEAST_BYTES, -(-most_bytes",
        "min(_LEAST_BYTES, -(-most_bytes",
        T_CIPHER,
    ),
    Mutant(
        "what a look has found damaged is not shown",
        _RECORD,
        "            with lock:\n                self.show()\n            raise\n",
        "            raise\n",
        T_CIPHER,
    ),
    Mutant(
        "what was written meanwhile is not taken for seen",
        _RECORD,
        "self.is_seen = self._num_shown == before",
        "self.is_seen = True",
        T_CIPHER,
    ),
    Mutant(
        "who looks twice keeps what was written between",
        _RECORD,
        "            if self.is_seen:\n",
        "            if False:\n",
        T_CIPHER,
    ),
    Mutant(
        "what is old is covered when a write begins",
        _RECORD,
        "        if seal:\n            self.show()\n",
        "        pass\n",
        T_STATE,
    ),
    # -- the key
    Mutant("nobody else may read the key", _KEY, "            if mode & 0o077:\n", "            if False:\n", T_KEY),
    Mutant(
        "a key does not lie beside what it protects",
        _KEY,
        "        if real.is_relative_to(folder.resolve()):\n",
        "        if False:\n",
        T_KEY,
    ),
    Mutant("links to a key are followed", _KEY, "real = path.resolve()", "real = path", T_KEY),
    Mutant(
        "a key is no text", _KEY, "        if key and all(chr(byte) in", "        if False and all(chr(byte) in", T_KEY
    ),
    Mutant("a key is random", _KEY, "    if len(set(key)) < _LEAST_VALUES:\n", "    if False:\n", T_KEY),
    Mutant(
        "an option that may be a key is not shown",
        _OPTIONS,
        "        key_source(key)  # first",
        "        pass  # first",
        T_KEY,
    ),
    Mutant(
        "a file is told apart from a key in an option",
        _OPTIONS,
        "value.startswith(_KEY_STARTS)",
        "value",
        T_KEY,
    ),
    Mutant(
        "a key is refused before there is a model",
        "lightning_cxl/run/host.py",
        "            Sealer(read_key(options.key, options.paths))",
        "            pass",
        T_RUN,
    ),
    Mutant(
        "a package that is too old to encrypt is refused",
        "lightning_cxl/storage/cipher.py",
        "            if int(version.partition(",
        "            if False and int(version.partition(",
        T_CIPHER,
    ),
    # -- who sees values
    Mutant(
        "of what is encrypted only what someone wrote counts",
        _RECORDS,
        "        for tensor in self._written():\n            at_slot",
        "        for tensor in self._tensors if self._written() else []:\n            at_slot",
        T_STATE,
    ),
    Mutant(
        "a look keeps what someone wrote",
        _RECORDS,
        "                tensor.copy_(value)",
        "                pass",
        T_STATE,
    ),
    Mutant(
        "state is decrypted where there is memory for it",
        _RECORDS,
        "    if nbytes > available - available // _LEFT_FREE:\n",
        "    if False:\n",
        T_STATE,
    ),
    Mutant(
        "state that follows a new memory format has values",
        _STATE,
        "            self.record.look()\n",
        "            pass\n",
        T_STATE,
    ),
    Mutant(
        "who asks for state gets values",
        _STATE,
        "            self.visits.look()\n        else:",
        "            self.visits.wait()\n        else:",
        T_STATE,
    ),
    Mutant(
        "state has values when its run is over",
        _STATE,
        "            self.visits.look()\n        except",
        "            self.visits.wait()\n        except",
        T_STATE,
    ),
    Mutant(
        "state that no memory can hold is taken away",
        "lightning_cxl/optim/cpu_adam.py",
        "            if self.kept.lost:\n",
        "            if False:\n",
        T_STATE,
    ),
    Mutant(
        "a checkpoint that copies has what someone wrote while it was made",
        _VISITS,
        "            return self.look()\n",
        "            return self.wait()\n",
        T_RUN,
    ),
    Mutant(
        "a checkpoint that refers needs no values",
        "lightning_cxl/integrations/lightning/strategy.py",
        "unseen([unwrap(optimizer)] if refers else [])",
        "unseen([])",
        T_RUN,
    ),
    Mutant(
        "who resumes needs no values",
        "lightning_cxl/run/checkpoint.py",
        "    with ssd_checkpoint.unseen(optimizers):\n",
        "    if True:\n",
        T_RUN,
    ),
    Mutant(
        "who resumes from references needs no values of them",
        _STATE,
        "        self._shows_values = False\n",
        "        self._shows_values = True\n",
        T_RUN,
    ),
)
