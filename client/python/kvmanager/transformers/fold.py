"""W_O of a model, folded for a codec that leaves attention's outputs in its own space (fold=1)."""

import hashlib

import torch


def output_projections(model: torch.nn.Module) -> dict[int, torch.nn.Linear]:
    """The output projection of each layer's attention."""
    return {module.layer_idx: module.o_proj for module in model.modules()
            if hasattr(module, "layer_idx") and isinstance(getattr(module, "o_proj", None), torch.nn.Linear)}


def fingerprint(model: torch.nn.Module) -> str:
    """Of every parameter its name, shape, type and 64 values: another checkpoint has another. Of a folded model, what
    it was before."""
    known = getattr(model, "kvmanager_fingerprint", None)
    if known is not None:
        return known
    digest, samples = hashlib.sha256(), {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        samples.setdefault((parameter.device, parameter.dtype), []).append(flat[:: max(1, flat.numel() // 64)][:64])
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype};".encode())
    for each in samples.values():  # one copy from a GPU each
        digest.update(torch.cat(each).float().cpu().numpy().tobytes())
    return digest.hexdigest()


def folded_with(model: torch.nn.Module) -> str | None:
    """The digest of the factors that are part of the model's W_O; None: of none."""
    return getattr(model, "kvmanager_folded", None)


def factors_digest(factors: list) -> str:
    digest = hashlib.sha256()
    for layer in factors:
        digest.update(b"-" if layer is None else bytes(memoryview(layer).cast("B")))
    return digest.hexdigest()


@torch.no_grad()
def fold_output_weights(model: torch.nn.Module, attachment) -> None:
    """Makes what the attachment's cache leaves out of attention's outputs part of W_O, in place, once: W_O A for the
    factor A of each query head's KV head. The model is then right with caches of this codec and calibration alone, not
    with another attention function. Nothing happens where the codec leaves nothing out, or W_O has it already.

    Errors: ValueError where other factors are part of W_O, or a layer has no `o_proj`."""
    factors = attachment.output_factors()
    if all(layer is None for layer in factors):
        return
    digest = factors_digest(factors)
    if folded_with(model) == digest:
        return
    if folded_with(model) is not None:
        raise ValueError("model: other factors are part of its W_O already; load it again")
    projections = output_projections(model)
    missing = [layer for layer in range(len(factors)) if factors[layer] is not None and layer not in projections]
    if missing:
        raise ValueError(f"model: layer {missing[0]} has no o_proj whose weights could be folded")
    model.kvmanager_fingerprint = fingerprint(model)
    for layer, values in enumerate(factors):
        if values is None:
            continue
        weight = projections[layer].weight
        kv_heads, head_dim = attachment.kv_heads, attachment.head_dim
        a = torch.tensor(values, dtype=torch.float32, device=weight.device).view(kv_heads, 1, head_dim, head_dim)
        w = weight.float().view(weight.shape[0], kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        weight.copy_((w @ a).permute(2, 0, 1, 3).reshape(weight.shape))
    model.kvmanager_folded = digest
