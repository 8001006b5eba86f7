# The frozen target. `FrozenTarget` and `TargetHead` are plain objects, never nn.Modules, so that nothing can train,
# wrap or save them by accident. Nothing here knows a model family: sizes are read from the config, constants that
# families hide in their code (embedding scale, logit scale) are measured, and `check` proves the result on the model.

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from drafters.errors import ConfigError
from drafters.kv_cache import TargetCache
from drafters.spec import TargetSpec, check_layer_ids
from drafters.target_loading import Placement, WholeTensors, head_tensors, outline
from drafters.target_probe import check, read_spec
from drafters.tree_pass import CANNOT, Pattern, check_trees, layer_patterns, tree_depths, tree_masks
from drafters.types import Needs, States, StepOutput
from drafters.weights import fingerprint, load_tokenizer, resolve, resolve_outline

__all__ = ["FrozenTarget", "TargetHead"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TargetHead:
    """The target's embedding and output projection: all that training from cached states needs."""

    def __init__(self, spec: TargetSpec, *, embedding_VD: Tensor, lm_head_VD: Tensor) -> None:
        self.spec = spec
        self.embedding_VD = embedding_VD.detach()
        self.lm_head_VD = lm_head_VD.detach()

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] as they enter the target's first layer."""
        embedded = self.embedding_VD[tokens]
        return embedded if self.spec.embed_scale == 1.0 else embedded * self.spec.embed_scale

    def logits(self, hidden: Tensor, *, support_V: Tensor | None = None) -> Tensor:
        """Float32 logits [..., V] of states after the final norm, over `support_V` (ids) or the whole vocabulary."""
        logits = (hidden.to(self.lm_head_VD.dtype) @ self.rows(support_V).T).float()
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_() * cap

    def rows(self, support_V: Tensor | None) -> Tensor:
        """Rows [V', D] of the output projection."""
        return self.lm_head_VD if support_V is None else self.lm_head_VD[support_V].contiguous()

    def to(self, device: torch.device | str) -> "TargetHead":
        """The same head on another device; a tied head stays tied."""
        embedding = self.embedding_VD.to(device)
        tied = self.lm_head_VD.data_ptr() == self.embedding_VD.data_ptr()
        return TargetHead(
            self.spec, embedding_VD=embedding, lm_head_VD=embedding if tied else self.lm_head_VD.to(device)
        )


class _Exit(Exception):
    """Ends a pass after a layer: the one way out of a forward method that every family has."""

    def __init__(self, state_BSD: Tensor) -> None:
        super().__init__()
        self.state_BSD = state_BSD


class FrozenTarget:
    """A causal LM of `transformers`, frozen: hidden states, logits, embeddings, cached decoding with rollback."""

    def __init__(
        self, model: Any, *, tokenizer: Any, spec: TargetSpec, stored: Mapping[str, Tensor] | None = None
    ) -> None:
        """`stored`: of a model whose layers are not in memory, its tensors where they lie."""
        self._stored = stored
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.spec = spec
        self.decoder: Any = self.model.get_decoder()
        embedding_VD, lm_head_VD = head_tensors(model)
        self.head = TargetHead(spec, embedding_VD=embedding_VD, lm_head_VD=lm_head_VD)
        config = self.model.config.get_text_config()
        self._sliding = any(getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        # transformers renamed the argument of decoders in 5.x; both spellings are served.
        parameters = inspect.signature(self.decoder.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._captured: dict[int, Tensor] = {}
        self._wanted: Sequence[int] = ()
        self._exit_layer: int | None = None
        self._patterns = layer_patterns(config, len(self.decoder.layers))
        self._masks: dict[Pattern, Tensor] = {}
        self._trees_checked = False
        for index, layer in enumerate(self.decoder.layers):
            layer.register_forward_hook(self._hook(index))
            layer.register_forward_pre_hook(self._mask_hook(index), with_kwargs=True)

    @property
    def has_layers(self) -> bool:
        """Whether it can make states and decode: not as an outline, nor with its head alone."""
        return self._stored is None and self.device.type != "meta"

    @property
    def device(self) -> torch.device:
        """Where tokens go, states come back and the head is; layers may lie elsewhere."""
        return self.head.embedding_VD.device

    @classmethod
    def load(
        cls,
        weights: str,
        *,
        sha256: str | None = None,
        dtype: str = "bfloat16",
        mask_token: str | int | None = None,
        name: str | None = None,
        device: Placement | torch.device | str = "cpu",
    ) -> "FrozenTarget":
        """Fetch, load and check a target; `name` is for people, `weights` when not given; `device` is one device, or a
        `Placement` over several.

        Raises ConfigError or CheckpointError with the key at fault.
        """
        kept_as = dtype_of(dtype)
        placement = device if isinstance(device, Placement) else Placement(device)
        folder = resolve(weights, sha256=sha256, with_code=placement.trust_remote_code)
        tokenizer = load_tokenizer(str(folder), trust_remote_code=placement.trust_remote_code)
        model = placement.load(folder, kept_as)
        return cls.from_model(
            model,
            tokenizer=tokenizer,
            mask_token_id=mask_id(mask_token, tokenizer, model.config.get_text_config().vocab_size),
            weights_hash=fingerprint(folder),
            name=name or weights,
        )

    @classmethod
    def outline(cls, weights: str, *, dtype: str, mask_token: str | int | None = None, **given: Any) -> "FrozenTarget":
        """A target without weights, which need not be there, on the meta device: sizes, modules and tokenizer. `given`:
        `sha256` and `name` as for `load`, `weights_hash` where it is known, `trust_remote_code`. Raises what `load`
        raises."""
        kept_as, trust = dtype_of(dtype), bool(given.get("trust_remote_code"))
        folder = resolve_outline(weights, sha256=given.get("sha256"), with_code=trust)
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trust)
        model = outline(folder, kept_as, trust_remote_code=trust)
        mask = mask_id(mask_token, tokenizer, model.config.get_text_config().vocab_size)
        spec = replace(
            read_spec(model, mask_token_id=mask, is_outline=True),
            template_hash=_template_hash(tokenizer),
            weights_hash=given.get("weights_hash") or "",
            name=given.get("name") or weights,
        )
        return cls(model, tokenizer=tokenizer, spec=spec)

    @classmethod
    def from_model(
        cls, model: Any, *, tokenizer: Any = None, mask_token_id: int = 0, weights_hash: str = "", name: str = ""
    ) -> "FrozenTarget":
        """Wrap a loaded model; `weights_hash` defaults to a hash of its parameters. Ends with the self-check.

        Raises ConfigError for a model that is no causal LM, or that the wrapper does not reproduce.
        """
        spec = read_spec(model.eval(), mask_token_id=mask_token_id)
        spec = replace(
            spec,
            template_hash=_template_hash(tokenizer),
            weights_hash=weights_hash or _hash_parameters(model),
            name=name,
        )
        target = cls(model, tokenizer=tokenizer, spec=spec)
        check(target)
        return target

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] as they enter the first layer."""
        return self.head.embed(tokens)

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's tensors by name, complete wherever they lie."""
        return WholeTensors(self.model) if self._stored is None else self._stored

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """The tensors of decoder layer `index`, by their names in it."""
        layer, tensors = self.decoder.layers[index], self.tensors()
        (prefix,) = (name for name, module in self.model.named_modules() if module is layer)
        return {name: tensors[f"{prefix}.{name}"] for name in layer.state_dict()}

    @torch.inference_mode()
    def states(self, tokens_BT: Tensor, *, needs: Needs, lengths_B: Tensor | None = None) -> States:
        """Hidden states of right-padded rows, without a cache.

        A causal model's valid tokens never see the padding to their right, so no mask is needed; states at padded
        positions are defined but meaningless. `lengths_B` is accepted so that callers state what is valid.
        """
        del lengths_B
        last_BTD, aux_BTLD = self._forward(needs, input_ids=tokens_BT.to(self.device), use_cache=False)
        return States(aux_BTLD=aux_BTLD, last_BTD=last_BTD if needs.last else None)

    def new_cache(self, batch_size: int) -> TargetCache:
        """An empty key/value cache of `batch_size` rows."""
        return TargetCache(batch_size=batch_size, sliding=self._sliding, device=self.device)

    @torch.inference_mode()
    def step(
        self,
        tokens_BS: Tensor,
        cache: TargetCache,
        *,
        lengths_B: Tensor | None = None,
        parents_S: tuple[int, ...] | None = None,
        needs: Needs = Needs(),  # noqa: B008  (frozen)
        logits: Literal["all", "last", "none"] = "all",
    ) -> StepOutput:
        """One pass over new tokens (right-padded, `lengths_B` valid a row) that appends them to `cache`.

        Logits are float32: [B, S, V] for "all", [B, 1, V] of each row's last valid slot for "last", [B, 0, V] for
        "none". Positions go on from `cache.lengths_B`.

        With `parents_S` the pass is over a tree: slot 0 is the anchor, slot 1 + s is tree slot s, whose parent is tree
        slot `parents_S[s]` (-1 = the anchor). Every slot sees the cache, its ancestors and itself, and has the position
        of its depth. Raises ConfigError for a target that cannot do that (see `check_trees`).
        """
        width = tokens_BS.shape[1]
        if lengths_B is not None:
            lengths_B = lengths_B.to(self.device)
        offsets_S = torch.arange(width, device=self.device)
        if parents_S is not None:
            self.check_trees()
            assert width == 1 + len(parents_S), f"{width} tokens for a tree of {len(parents_S)} slots and its anchor"
            offsets_S = tree_depths(parents_S).to(self.device)
        positions_BS = cache.lengths_B[:, None] + offsets_S
        mask = cache.append(lengths_B, width)
        if parents_S is not None:
            dtype = self.head.embedding_VD.dtype
            self._masks = tree_masks(set(self._patterns), cache.valid_BS, positions_BS, parents_S, dtype=dtype)
            mask = self._masks[self._patterns[0]]
        try:
            last_BSD, aux_BSLD = self._forward(
                needs,
                input_ids=tokens_BS.to(self.device),
                attention_mask=mask,
                position_ids=positions_BS,
                use_cache=True,
                **{self._cache_name: cache.hf},
            )
        finally:
            self._masks = {}
        read = last_BSD
        if logits == "last":
            ends_B = torch.full_like(cache.lengths_B, width) if lengths_B is None else lengths_B
            read = last_BSD.gather(1, (ends_B - 1)[:, None, None].expand(-1, 1, last_BSD.shape[2]))
        elif logits == "none":
            read = last_BSD[:, :0]
        return StepOutput(
            logits_BSV=self.head.logits(read), aux_BSLD=aux_BSLD, last_BSD=last_BSD if needs.last else None
        )

    @torch.inference_mode()
    def first_layers(self, tokens_BS: Tensor, cache: TargetCache, *, exit_layer: int) -> Tensor:
        """Output [B, S, D] of decoder layer `exit_layer` for new tokens, all valid; the layers after it do not run.

        The layers up to it append to `cache`, so this belongs within `cache.draft()`, which undoes it.
        """
        width = tokens_BS.shape[1]
        positions_BS = cache.lengths_B[:, None] + torch.arange(width, device=self.device)
        mask = cache.append(None, width)
        self._exit_layer = exit_layer
        try:
            self.decoder(
                input_ids=tokens_BS.to(self.device),
                attention_mask=mask,
                position_ids=positions_BS,
                use_cache=True,
                **{self._cache_name: cache.hf},
            )
        except _Exit as reached:
            return reached.state_BSD
        finally:
            self._exit_layer = None
        raise AssertionError(f"the target has no layer {exit_layer}")

    @property
    def final_norm(self) -> Any:
        """The module that makes the last state of the last layer's output. Raises ConfigError where it is not found."""
        norm = getattr(self.decoder, "norm", None)
        if norm is None:
            raise ConfigError(f"target: {type(self.decoder).__name__} has no final `norm`, so no early layer can draft")
        return norm

    def check_trees(self) -> None:
        """Prove, once, that a tree pass gives what plain decoding of its paths gives; `step` calls it by itself.

        Raises ConfigError naming `tree` when this target cannot verify trees.
        """
        if not self._trees_checked:
            self._trees_checked = True
            try:
                check_trees(self)
            except ConfigError:
                self._trees_checked = False
                raise

    @contextmanager
    def capture(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Within it, a pass of the model fills the dictionary with the outputs [B, T, D] of these layers."""
        check_layer_ids(tuple(sorted(layer_ids)), self.spec)
        self._wanted, self._captured = layer_ids, {}
        try:
            yield self._captured
        finally:
            self._wanted, self._captured = (), {}

    def _forward(self, needs: Needs, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        assert self.has_layers, "a target without its layers makes no states"
        with self.capture(needs.layer_ids) as captured:
            last: Tensor = self.decoder(**inputs).last_hidden_state.to(self.device)
        aux = [captured[layer] for layer in needs.layer_ids]
        return last, torch.stack(aux, dim=2) if aux else None

    def _hook(self, index: int) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            state_BSD = output[0] if isinstance(output, tuple) else output
            if index in self._wanted:
                self._captured[index] = state_BSD.to(self.device)
            if index == self._exit_layer:
                raise _Exit(state_BSD.to(self.device))

        return keep

    def _mask_hook(self, index: int) -> Any:
        """In a tree pass every layer gets the mask of its own pattern, whatever the model made of the one it got."""

        def put(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not self._masks:
                return None
            if "attention_mask" not in kwargs:
                raise ConfigError(CANNOT.format("its layers take no attention mask"))
            return args, {**kwargs, "attention_mask": self._masks[self._patterns[index]]}

        return put


def dtype_of(name: str) -> torch.dtype:
    """Raises ConfigError for a dtype that targets are not kept in."""
    if name not in DTYPES:
        raise ConfigError(f"target.dtype: got '{name}'; accepted: {', '.join(DTYPES)}")
    return DTYPES[name]


def mask_id(mask_token: str | int | None, tokenizer: Any, vocab_size: int) -> int:
    """The id of the mask token of block drafters: a token string, an id, or None (the tokenizer's mask, pad or eos).

    Raises ConfigError when it is not in the vocabulary.
    """
    if mask_token is None:
        for found in (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
            if found is not None:
                return int(found)
        raise ConfigError("target.mask_token: missing, and the tokenizer has no mask, pad or eos token; name one")
    if isinstance(mask_token, int):
        if not 0 <= mask_token < vocab_size:
            raise ConfigError(
                f"target.mask_token: id {mask_token} is not in the vocabulary; accepted: 0..{vocab_size - 1}"
            )
        return mask_token
    found = tokenizer.get_vocab().get(mask_token)
    if found is None or found >= vocab_size:
        raise ConfigError(
            f"target.mask_token: '{mask_token}' is not in the vocabulary; name an unused special token, or an id"
        )
    return int(found)


def _template_hash(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return hashlib.sha256(str(template).encode()).hexdigest()


def _hash_parameters(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
