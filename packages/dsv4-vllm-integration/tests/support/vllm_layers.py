# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layer and attention objects on the CPU, as far as the projection needs them.

Linear layers, quantisation methods, kernels' weight layouts, attention classes and process groups are vLLM's.
What has no CPU form is replaced by arithmetic of the same meaning: the product of FlashInfer's and Marlin's
kernels, and Marlin's repacking operator.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from dsv4_gemm_rs import ScaleLayout, dequantize_mxfp8, quantize_mxfp8
from dsv4_gemm_rs.quantize import unswizzle_scales

BLOCK = 32


def configuration(**changes: Any) -> Any:
    """What the gate reads of a `VllmConfig`, by the names that vLLM's classes have."""
    values = {
        "max_num_batched_tokens": 256,
        "hidden_size": 128,
        "dtype": torch.bfloat16,
        "use_ubatching": False,
        "lora_config": None,
        "enable_sleep_mode": False,
        "enable_expert_parallel": True,
        "data_parallel_size": 2,
    } | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            use_ubatching=values["use_ubatching"],
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            data_parallel_size=values["data_parallel_size"],
            enable_expert_parallel=values["enable_expert_parallel"],
        ),
        kernel_config=SimpleNamespace(moe_backend="auto", enable_jit_warmup=False),
        model_config=SimpleNamespace(
            dtype=values["dtype"],
            enable_sleep_mode=values["enable_sleep_mode"],
            hf_config=SimpleNamespace(
                hidden_size=values["hidden_size"],
                rms_norm_eps=1e-6,
                hc_mult=4,
                hc_sinkhorn_iters=2,
                hc_eps=1e-6,
            ),
            hf_text_config=SimpleNamespace(hidden_size=values["hidden_size"]),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=values["max_num_batched_tokens"]),
        lora_config=values["lora_config"],
    )


def random_weight(n: int, k: int, seed: int) -> torch.Tensor:
    """FP32 [N, K]."""
    weight: torch.Tensor = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / float(k) ** 0.5
    return weight


def random_activations(m: int, k: int, seed: int) -> torch.Tensor:
    """BF16 [M, K] with rows of different size."""
    generator = torch.Generator().manual_seed(1000 + seed)
    spread = torch.randint(-3, 4, (m, 1), generator=generator).float().exp2()
    return (torch.randn(m, k, generator=generator) * spread).to(torch.bfloat16)


class QuantConfig:
    """A quantisation config that gives every layer the one method."""

    online_quantization_config = None

    def __init__(self, method: Any) -> None:
        self.method = method

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method."""
        return self.method


def _row_parallel(n: int, k_total: int, quant_config: Any, reduce_results: bool) -> Any:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import RowParallelLinear

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        return RowParallelLinear(
            k_total,
            n,
            bias=False,
            reduce_results=reduce_results,
            params_dtype=torch.bfloat16,
            quant_config=quant_config,
            return_bias=False,
            prefix="model.layers.0.attn.wo_b",
        )


def bf16_layer(n: int, k: int, world_size: int, seed: int, *, reduce_results: bool = False) -> Any:
    """The unquantised row-parallel layer."""
    layer = _row_parallel(n, k * world_size, None, reduce_results)
    load_bf16(layer, seed)
    return layer


def load_bf16(layer: Any, seed: int) -> None:
    """Load weights as vLLM does: through `.data`, then post-processing."""
    n, k = layer.weight.shape
    layer.weight.data.copy_(random_weight(n, k, seed).to(torch.bfloat16))
    layer.quant_method.process_weights_after_loading(layer)


def _flashinfer_product(layer: Any, x: Any, transposed: bool) -> torch.Tensor:
    weight = layer.weight.t() if transposed else layer.weight
    n, k = weight.shape
    if isinstance(x, torch.Tensor):
        quantised = quantize_mxfp8(x)
        data, scale = quantised.data, quantised.scale
    else:
        data, scale = x.data, x.scale
    left = dequantize_mxfp8(data, unswizzle_scales(scale, data.shape[0], k))
    right = dequantize_mxfp8(weight.contiguous(), unswizzle_scales(layer.weight_scale, n, k))
    return (left @ right.T).to(torch.bfloat16)


def kernel_of(name: str) -> Any:
    """The kernel object of this name with its product computed on the CPU; layouts are vLLM's own code."""
    from vllm.model_executor.kernels.linear.mxfp8 import flashinfer, marlin
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig

    if name == "MarlinMxfp8LinearKernel":

        def repack(self: Any, layer: Any) -> None:
            # As prepare_mxfp8_layer_for_marlin does: another shape, another dtype, the original gone.
            from vllm.model_executor.utils import replace_parameter

            layer.kept = dequantize_mxfp8(layer.weight.data, layer.weight_scale.data)
            packed = layer.weight.data.view(torch.int32).T.contiguous()
            replace_parameter(layer, "weight", packed)
            replace_parameter(layer, "weight_scale", layer.weight_scale.data.T.contiguous())

        def apply(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            product: torch.Tensor = x.float() @ layer.kept.T
            return product.to(torch.bfloat16)

        base: Any = marlin.MarlinMxfp8LinearKernel
        body = {"process_weights_after_loading": repack, "apply_weights": apply}
    else:
        base = getattr(flashinfer, name)
        transposed = "Cutedsl" in name

        def product(self: Any, layer: Any, x: Any, bias: Any = None) -> torch.Tensor:
            return _flashinfer_product(layer, x, transposed)

        body = {"apply_weights": product}
    made = type(name, (base,), body)
    kernel: Any = object.__new__(made)
    kernel.config = Mxfp8LinearLayerConfig(weight_shape=(1, 1))
    return kernel


def mxfp8_layer(n: int, k: int, world_size: int, kernel: str, *, reduce_results: bool = False) -> Any:
    """The MXFP8 row-parallel layer, created and not loaded."""
    from vllm.model_executor.layers.fusion.quant_activation import expose_input_quant_key
    from vllm.model_executor.layers.quantization import modelopt

    chosen = kernel_of(kernel)
    modelopt.init_mxfp8_linear_kernel = lambda **_: chosen
    spec = modelopt.QuantSpec(modelopt.kMxfp8Static, modelopt.kMxfp8Dynamic)
    method = modelopt.ModelOptLinearMethod(spec, modelopt.CkptCtx(scale_block_size=(32, 32)))
    layer = _row_parallel(n, k * world_size, QuantConfig(method), reduce_results)
    expose_input_quant_key(layer, chosen)
    return layer


def load_mxfp8(layer: Any, n: int, k: int, seed: int) -> None:
    """Load a checkpoint's weight into fresh parameters, then let vLLM's method lay it out.

    At a reload the parameters that kernels hold keep their addresses, as in vLLM's layer-wise reload.
    """
    from torch.nn import Parameter

    held = {name: getattr(layer, name).data for name in ("weight", "weight_scale")}
    first = held["weight"].dtype == torch.float8_e4m3fn and held["weight_scale"].dim() == 2
    quantised = quantize_mxfp8(random_weight(n, k, seed), layout=ScaleLayout.ROW_MAJOR)
    if first:
        layer.weight.data.copy_(quantised.data)
        layer.weight_scale.data.copy_(quantised.scale)
        layer.quant_method.process_weights_after_loading(layer)
        return
    layer.weight = Parameter(quantised.data.clone(), requires_grad=False)
    layer.weight_scale = Parameter(quantised.scale.clone(), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    for name, kept in held.items():
        kept.copy_(getattr(layer, name).data)
        setattr(layer, name, Parameter(kept, requires_grad=False))


def attention(wo_b: Any) -> Any:
    """The attention object of V4.1 with mega-attention, holding only what the projection uses."""
    from vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn import DeepseekV4MegaAttnAttention

    made = DeepseekV4MegaAttnAttention.__new__(DeepseekV4MegaAttnAttention)
    torch.nn.Module.__init__(made)
    made.wo_b = wo_b
    made.gemm_rs = None
    made.o_lora_rank = 128
    made._einsum_recipe = (1, 1, 32)
    return made


def decoder_layer(attn: Any, vllm_config: Any, **options: Any) -> Any:
    """V4.1's decoder layer around `attn`, made by vLLM's own constructor; its MoE is left out."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.models.deepseek_v41.nvidia import model

    parts: Any = model
    parts._select_dsv4_attn_cls = lambda _: lambda *given, **named: attn
    parts.DeepseekV4MoE = lambda *given, **named: torch.nn.Module()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        return model.DeepseekV4DecoderLayer(vllm_config, "model.layers.0", torch.empty(0), **options)


def quantized_activation(x: torch.Tensor) -> Any:
    """A pre-quantised activation, as mega-attention hands it over."""
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Dynamic

    quantised = quantize_mxfp8(x)
    return QuantizedActivation(quantised.data, quantised.scale, torch.bfloat16, x.shape, kMxfp8Dynamic)
