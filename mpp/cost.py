"""What a model costs, counted on tensors without storage."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from mpp.model import encoder_of
from mpp.objectives import Objective

A100_FLOPS = 312e12  # NVIDIA's data sheet: dense bf16
UTILIZATION = 0.4  # an assumption, usual for well-fed Vision Transformers


@dataclass(frozen=True)
class Cost:
    """Of one model; FLOPs count a multiply-add as 2, as the ViT paper's exaFLOPs do.

    Attributes:
        parameters: of everything that is trained.
        encoder_parameters: of these, the encoder's.
        forward_flops: of one image.
        activation_bytes: kept for the backward pass of one image.
    """

    parameters: int
    encoder_parameters: int
    forward_flops: float
    activation_bytes: float


def of_model(model: nn.Module, objective: Objective, batch: Mapping[str, Tensor]) -> Cost:
    """Counts one forward pass of a model on the meta device.

    Args:
        batch: what the objective takes, on the meta device.
    """
    images = len(batch["images"])
    kept: dict[int, int] = {}
    weights = {id(parameter) for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights:
            kept[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    with FlopCounterMode(display=False) as flops, saved_tensors_hooks(keep, lambda tensor: tensor):
        prediction = objective.predict(model, batch)
    del prediction
    count = sum(parameter.numel() for parameter in model.parameters())
    inside = sum(p.numel() for name, p in encoder_of(model).named_parameters() if not name.startswith("head."))
    return Cost(count, inside, flops.get_total_flops() / images, sum(kept.values()) / images)
