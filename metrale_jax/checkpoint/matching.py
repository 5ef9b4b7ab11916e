"""The stored tensors held against the config, before anything is allocated.

Each parameter must be stored in exactly one of its known forms, with the right shapes,
and each stored tensor must be part of a parameter or of something left out on purpose:

- vision towers (`model.visual.*`, `visual.*`) of the families that have one;
- `mtp.*` when the multi-token-prediction head isn't asked for;
- the output head of a tied target, if it equals the embedding: some exporters write it
  all the same. One that differs belongs to an untied target, so it is an error
  (`reading.require_equal` compares them).

How a tensor is quantised is read from the tensor and its neighbours, never from the
config, because exporters leave different parts plain and describe that differently.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax

from metrale_jax import config as config_lib
from metrale_jax.checkpoint import errors, headers, layout
from metrale_jax.model.params import ModelParams, ParamSpec

PLAIN_DTYPES = ("F32", "BF16", "F16")
FP8_DTYPE = "F8_E4M3"
FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"

# Endings of names that other quantised formats put in place of a weight, or beside it.
_PACKED_ENDINGS = (
    "weight_packed",
    "qweight",
    "weight_shape",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "qzeros",
    "scales",
    "biases",
    "g_idx",
    "SCB",
    "absmax",
    "quant_map",
)
_SUPPORTED_KINDS = (
    "float32, bfloat16, float16, or float8_e4m3fn with 128 x 128 blocks of "
    "`weight_scale_inv`"
)


@dataclasses.dataclass(frozen=True)
class Match:
    """How a checkpoint stores a target.

    Attributes:
      forms: the form that is present, for each parameter.
      tied_head: name of a stored output head that a tied target does not need.
    """

    forms: ModelParams[layout.Form]
    embedding: str
    tied_head: str | None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the block scales of a float8 tensor of at least two axes."""
    blocks = tuple(math.ceil(size / FP8_BLOCK) for size in shape[-2:])
    return (*shape[:-2], *blocks)


def match(
    stored: Mapping[str, headers.StoredTensor],
    config: config_lib.ModelConfig,
    specs: ModelParams[ParamSpec],
) -> Match:
    """Finds how each parameter is stored, and accounts for every stored tensor.

    Raises:
      errors.CheckpointError: tensors are missing, unused, of a wrong shape or dtype,
        stored in two forms, or quantised in an unsupported way; names up to five.
    """
    prefix = _find_prefix(stored)
    known = layout.describe_layout(config, specs, prefix)
    account = Account(stored)
    forms = jax.tree.map(account.choose, known)
    tied_head = prefix.head if specs.lm_head is None else None
    account.skip(lambda name: name == tied_head)
    if specs.mtp is None:
        account.skip(lambda name: name.startswith(layout.MTP_PREFIX))
    if layout.FAMILIES[config.model_type].has_vision:
        account.skip(lambda name: name.startswith(layout.VISION_PREFIXES))
    account.settle()
    return Match(
        forms=forms,
        embedding=f"{prefix.text}embed_tokens.weight",
        tied_head=tied_head if tied_head in stored else None,
    )


def check_size(
    stored: Mapping[str, headers.StoredTensor], config: config_lib.ModelConfig
) -> None:
    """Refuses a config that claims more layers than there are tensors.

    To be called before the layers are spelled out.

    Raises:
      errors.CheckpointError: there are fewer tensors than layers.
    """
    if config.num_layers > len(stored):
        raise errors.CheckpointError(
            "holds fewer tensors than config.json has layers",
            file=_folder(stored),
            expected=f"{config.num_layers} layers",
            found=f"{len(stored)} tensors",
        )


def _folder(stored: Mapping[str, headers.StoredTensor]) -> str | None:
    return next((str(tensor.file.parent) for tensor in stored.values()), None)


def _find_prefix(stored: Mapping[str, headers.StoredTensor]) -> layout.Prefix:
    """Returns the prefix of most layers' tensors; the stored head breaks ties."""
    num_tensors = {
        prefix: sum(name.startswith(f"{prefix.text}layers.") for name in stored)
        for prefix in layout.PREFIXES
    }
    best = max(num_tensors, key=lambda it: (num_tensors[it], it.head in stored))
    if not num_tensors[best]:
        beginnings = dict.fromkeys(prefix.text for prefix in layout.PREFIXES)
        raise errors.CheckpointError(
            "holds no decoder layers",
            file=_folder(stored),
            expected=" or ".join(f"`{text}layers.*`" for text in beginnings),
            found=errors.listed(sorted(stored), limit=3),
        )
    return best


class Account:
    """Books each stored tensor as used, skipped or unknown, and each expected one."""

    def __init__(self, stored: Mapping[str, headers.StoredTensor]) -> None:
        self._stored = stored
        self._expected: dict[str, tuple[int, ...]] = {}
        self._skipped: set[str] = set()
        self._reshaped: set[str] = set()
        self._twice: list[str] = []

    def choose(self, forms: layout.Forms) -> layout.Form:
        """Books the form that is present; of none, the published one is missing."""
        # A form with more tensors than there are in all need not be spelled out: a
        # config may claim any number of experts.
        possible = [form for form in forms.all if form.num_tensors <= len(self._stored)]
        expected = [form.tensors() for form in possible]
        present = [
            index
            for index, names in enumerate(expected)
            if any(name in self._stored for name in names)
        ]
        if len(present) > 1:
            self._twice += [
                next(name for name in expected[index] if name in self._stored)
                for index in present
            ]
        chosen = present[0] if present else 0
        form = possible[chosen]
        self._expected.update(expected[chosen])
        if isinstance(form, layout.Whole) and form.stored_shape != form.shape:
            self._reshaped.add(form.tensor)
        return form

    def skip(self, is_skipped) -> None:
        """Leaves out the stored tensors whose name satisfies `is_skipped`."""
        self._skipped.update(name for name in self._stored if is_skipped(name))

    def settle(self) -> None:
        """Raises for the first kind of disagreement, the most telling kind first."""
        scales = self._claim_scales()
        unused = [
            name
            for name in self._stored
            if name not in self._expected and name not in self._skipped | scales
        ]
        self._refuse_packed(unused)
        missing = [name for name in self._expected if name not in self._stored]
        problems = []
        if missing:
            problems.append(f"missing {errors.listed(missing)}")
        if missing and all(name.startswith(layout.MTP_PREFIX) for name in missing):
            problems.append("the multi-token-prediction head, which many exports drop")
        if self._twice:
            problems.append(f"stored in two forms {errors.listed(self._twice)}")
        elif unused:
            problems.append(f"unused {errors.listed(unused)}")
        if problems:
            tensor = (missing or self._twice or unused)[0]
            raise errors.CheckpointError(
                "tensors do not match config.json: " + "; ".join(problems),
                file=self._file(tensor),
                tensor=tensor,
            )
        self._check_shapes()

    def _file(self, name: str) -> str | None:
        if name in self._stored:
            return str(self._stored[name].file)
        return _folder(self._stored)

    def _claim_scales(self) -> set[str]:
        """Returns the block scales of the float8 tensors that are expected."""
        return {
            name + SCALE_SUFFIX
            for name in self._expected
            if name in self._stored
            and self._stored[name].dtype == FP8_DTYPE
            and name + SCALE_SUFFIX in self._stored
        }

    def _refuse_packed(self, unused: list[str]) -> None:
        """Refuses quantised tensors before their odd names and shapes mislead."""
        for ending in _PACKED_ENDINGS:
            for name in unused:
                if name.endswith(f".{ending}"):
                    raise self._unsupported(name)
        for name in self._expected:
            tensor = self._stored.get(name)
            if tensor is None or tensor.dtype in PLAIN_DTYPES:
                continue
            is_matrix = len(tensor.shape) > 1 and name not in self._reshaped
            has_scale = name + SCALE_SUFFIX in self._stored
            if tensor.dtype != FP8_DTYPE or not is_matrix or not has_scale:
                raise self._unsupported(name)

    def _unsupported(self, name: str) -> errors.CheckpointError:
        tensor = self._stored[name]
        found = f"{tensor.dtype} {list(tensor.shape)}"
        if tensor.dtype == FP8_DTYPE:
            found += f" without `{errors.shown(name)}{SCALE_SUFFIX}`"
        return errors.CheckpointError(
            "tensor's dtype or quantisation is not supported",
            file=tensor.file,
            tensor=name,
            expected=_SUPPORTED_KINDS,
            found=found,
        )

    def _check_shapes(self) -> None:
        expected = dict(self._expected)
        for name in self._claim_scales():
            expected[name] = scale_shape(self._stored[name[: -len(SCALE_SUFFIX)]].shape)
            if self._stored[name].dtype not in PLAIN_DTYPES:
                raise self._unsupported(name)
        wrong = [
            name
            for name, shape in expected.items()
            if self._stored[name].shape != shape
        ]
        if wrong:
            rest = f" (so has {errors.listed(wrong[1:])})" if len(wrong) > 1 else ""
            tensor = self._stored[wrong[0]]
            raise errors.CheckpointError(
                f"tensor has a shape that config.json does not imply{rest}",
                file=tensor.file,
                tensor=tensor.name,
                expected=expected[wrong[0]],
                found=tensor.shape,
            )
