"""From a config to the parameters of every layer, under their Hugging Face names."""

from __future__ import annotations

from dtensor_5d.families.blocks import LayerShape, Mixer, Param, linear, vector
from dtensor_5d.families.fields import Fields, layer_kind
from dtensor_5d.families.linear_mixers import LINEAR_MIXERS
from dtensor_5d.families.recipes import Moe, Recipe

__all__ = ["build_layer", "layer_kinds", "norm_params"]


def build_layer(fields: Fields, recipe: Recipe, index: int, kind: str) -> LayerShape:
    """The layer at this place: attention of this kind, then an MLP or experts, then the norms."""
    fields = fields.at_layer(index)
    prefix = f"{recipe.root}.{recipe.layers}.{index}."
    if kind == "linear" and recipe.linear:
        mix, mixer = LINEAR_MIXERS[recipe.linear](fields, prefix)
    elif recipe.mla:
        mix, mixer = _latent_attention(fields, recipe, prefix + recipe.attention)
    else:
        mix, mixer = _attention(fields, recipe, prefix + recipe.attention, index, kind)
    moe = recipe.moe if recipe.moe and has_experts(fields, recipe.moe, index) else None
    beside = 0
    if moe:
        feed, inner = _experts(fields, recipe, moe, prefix)
        if moe.beside:
            dense, beside = _mlp(fields, recipe, prefix, index)
            feed += dense
    else:
        feed, inner = _mlp(fields, recipe, prefix, index)
    norms = [p for name in (*_norm_names(fields, recipe), *(moe.norms if moe else ())) for p in norm_params(fields, recipe, prefix + name)]
    extra = _per_layer_embedding_params(fields, prefix)
    return LayerShape(
        index,
        tuple(mix + feed + norms + extra),
        mixer,
        inner,
        gated=recipe.mlp_fused or len(recipe.mlp_names) == 3 or moe is not None,
        experts=fields.count("experts") if moe else 0,
        experts_per_token=fields.per_layer("experts_per_token", index) if moe else 0,
        beside=beside,
    )


def norm_params(fields: Fields, recipe: Recipe, name: str, size: int | None = None) -> list[Param]:
    """Weight, and bias where the family has one."""
    size = size or fields.count("hidden_size")
    if recipe.norm == "none":
        return []
    made = [vector(f"{name}.weight", size, "norm")]
    if recipe.norm == "layer" and recipe.norm_bias:
        made.append(vector(f"{name}.bias", size, "norm"))
    return made


def _norm_names(fields: Fields, recipe: Recipe) -> tuple[str, ...]:
    names = recipe.norms
    if recipe.layers == "h" and recipe.embed == "word_embeddings" and fields.get("ffn_hidden_size") is not None:
        # Falcon: three generations of layers
        new = bool(fields.get("new_decoder_architecture", False))
        count = fields.get("num_ln_in_parallel_attn", 2 if new else None)
        if not fields.flag("parallel_attn"):
            return ("post_attention_layernorm", "input_layernorm")
        return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
    if recipe.parallel == "use_parallel_residual" and recipe.root == "model" and fields.flag(recipe.parallel):
        return names[:1]
    return names


# ---------------------------------------------------------------------------------------------- which layer is what


def layer_kinds(fields: Fields, recipe: Recipe) -> list[str]:
    """full, sliding, chunked or linear for every layer, from layer_types or from the family's rule."""
    layers = fields.count("num_hidden_layers")
    given = fields.get("layer_types")
    if isinstance(given, (list, tuple)):
        kinds = [layer_kind(k) or "full" for k in given]
        return [*kinds[:-1], "full"] if recipe.last_full else kinds
    if recipe.linear == "mamba":
        period, offset = fields.count("attn_layer_period", 8), int(fields.get("attn_layer_offset", 4))
        return ["full" if i % period == offset else "linear" for i in range(layers)]
    if recipe.linear == "conv":
        full = fields.get("full_attn_idxs")
        return ["full" if full is None or i in full else "linear" for i in range(layers)]
    if recipe.linear:
        every = fields.count("full_attention_interval", recipe.pattern)
        return ["full" if (i + 1) % every == 0 else "linear" for i in range(layers)]
    if recipe.mlp == "feed_forward":  # Llama 4: chunked where there are rotary positions
        every = fields.count("no_rope_layer_interval", 4)
        return ["full" if (i + 1) % every == 0 else "chunked" for i in range(layers)]
    if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
        return ["full"] * layers
    if fields.get("max_window_layers") is not None:
        return ["sliding" if i >= int(fields.get("max_window_layers")) else "full" for i in range(layers)]
    pattern = fields.get("sliding_window_pattern", recipe.pattern)
    if not isinstance(pattern, int) or pattern < 1:
        return ["sliding"] * layers
    kinds = ["full" if (i + 1) % pattern == 0 else "sliding" for i in range(layers)]
    return [*kinds[:-1], "full"] if recipe.last_full else kinds


def has_experts(fields: Fields, moe: Moe, index: int) -> bool:
    """Whether the layer at this place has experts."""
    types = fields.get("mlp_layer_types")
    if isinstance(types, (list, tuple)):
        return types[index] == "sparse"
    if not isinstance(fields.get("experts"), int) or fields.get("experts") == 0:
        return False
    if moe.when == "flag":
        return bool(fields.get("enable_moe_block"))
    if moe.when == "first_k":
        return index >= int(fields.get("first_k_dense_replace", fields.get("num_dense_layers", 0)))
    if moe.when == "step":
        dense = fields.get("mlp_only_layers") or ()
        return index not in dense and (index + 1) % fields.count("decoder_sparse_step", 1) == 0
    if moe.when == "layers":
        chosen = fields.get("moe_layers")
        step = fields.count("interleave_moe_layer_step", 1)
        return index in chosen if chosen is not None else (index + 1) % step == 0
    if moe.when == "period":
        return index % fields.count("expert_layer_period", 2) == int(fields.get("expert_layer_offset", 1))
    if moe.when == "interval":
        last = fields.get("moe_layer_end_index", -1)
        last = last if last >= 0 else fields.count("num_hidden_layers") - 1
        step = fields.count("moe_layer_interval", 1)
        return (index + 1) % step == 0 and int(fields.get("moe_layer_start_index", 1)) <= index <= last
    return True


# ------------------------------------------------------------------------------------------------------- attention


def _attention(fields: Fields, recipe: Recipe, name: str, index: int, kind: str) -> tuple[list[Param], Mixer]:
    hidden, heads, size = fields.count("hidden_size"), fields.count("num_attention_heads"), fields.head_size
    kv = _kv_heads(fields, recipe, heads)
    if kind == "full" and recipe.last_full and not fields.has_layers:
        # Gemma 4 as published; transformers turns these into per_layer_config when it reads them.
        size = fields.count("global_head_dim", fields.count("full_head_dim"))
        if fields.get("attention_k_eq_v") and fields.get("num_global_key_value_heads"):
            kv = fields.count("num_global_key_value_heads")
    in_bias, out_bias = fields.flag(recipe.qkv_bias), fields.flag(recipe.out_bias)
    made: list[Param] = []
    if recipe.sinks:
        made.append(vector(f"{name}.sinks", heads, "attention", cut=True))
    reuses = _reuses_keys(fields, index)
    queries = heads * (2 if recipe.attention_gate == "q" else 1)
    if len(recipe.qkv) == 1:
        made += linear(
            f"{name}.{recipe.qkv[0]}", (heads + 2 * kv) * size, hidden, "attention", "column", bias=in_bias,
            granule=size, transposed=recipe.conv1d,
        )  # fmt: skip
    else:
        q, k, v = recipe.qkv
        made += linear(
            f"{name}.{q}", queries * size, hidden, "attention", "column", bias=in_bias, granule=queries // heads * size
        )
        if not reuses:
            shared_value = kind == "full" and bool(fields.get("attention_k_eq_v"))
            for each in (k,) if shared_value else (k, v):
                made += linear(f"{name}.{each}", kv * size, hidden, "attention", "column", bias=in_bias, granule=size)
    if recipe.qk_norm and fields.flag(recipe.qk_norm_if):
        made += _qk_norms(recipe, name, heads, kv, size, with_key=not reuses)
    if recipe.attention_gate and recipe.attention_gate != "q":
        made += linear(f"{name}.{recipe.attention_gate}", heads * size, hidden, "attention", "column", granule=size)
    made += linear(
        f"{name}.{recipe.out}", hidden, hidden if recipe.out_square else heads * size, "attention", "row", bias=out_bias, granule=size,
        transposed=recipe.conv1d,
    )  # fmt: skip
    window = 0
    if kind == "sliding":
        window = fields.count("sliding_window")
    elif kind == "chunked":
        window = fields.count("attention_chunk_size", 8192)
    return made, Mixer(kind, heads, kv, size, size, window)


def _qk_norms(recipe: Recipe, name: str, heads: int, kv: int, size: int, with_key: bool) -> list[Param]:
    made: list[Param] = []
    for own, count in zip(recipe.qk_names, (heads, kv) if with_key else (heads,)):
        if recipe.qk_norm == "full":
            made.append(vector(f"{name}.{own}.weight", count * size, "norm", cut=True, granule=size))
        elif recipe.qk_norm == "layer_heads":
            made += [vector(f"{name}.{own}.norms.{i}.weight", size, "norm") for i in range(count)]
        elif recipe.qk_norm == "cohere_heads":
            made.append(Param(f"{name}.{own}.weight", (count, size), "norm", 0))
        else:
            made.append(vector(f"{name}.{own}.weight", size, "norm"))
            if recipe.qk_norm == "layer":
                made.append(vector(f"{name}.{own}.bias", size, "norm"))
    return made


def _kv_heads(fields: Fields, recipe: Recipe, heads: int) -> int:
    if recipe.kv == "heads":
        return heads
    if recipe.kv == "multi_query":
        if fields.get("new_decoder_architecture"):
            return int(fields.get("num_key_value_heads", heads))
        return 1 if fields.flag("multi_query") else heads
    return int(fields.get("num_key_value_heads", heads))


def _reuses_keys(fields: Fields, index: int) -> bool:
    shared = fields.get("num_kv_shared_layers", 0)
    return bool(shared) and index >= fields.count("num_hidden_layers") - shared


def _latent_attention(fields: Fields, recipe: Recipe, name: str) -> tuple[list[Param], Mixer]:
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    rope, plain, value = (fields.count(n) for n in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    latent, size, bias = fields.count("kv_lora_rank"), rope + plain, fields.flag(recipe.qkv_bias)
    made: list[Param] = []
    if fields.get("q_lora_rank") is None:
        made += linear(f"{name}.q_proj", heads * size, hidden, "attention", "column", granule=size)
    else:
        rank = fields.count("q_lora_rank")
        made += linear(f"{name}.q_a_proj", rank, hidden, "attention", bias=bias)
        made.append(vector(f"{name}.q_a_layernorm.weight", rank, "norm"))
        made += linear(f"{name}.q_b_proj", heads * size, rank, "attention", "column", granule=size)
    made += linear(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden, "attention", bias=bias)
    made.append(vector(f"{name}.kv_a_layernorm.weight", latent, "norm"))
    made += linear(f"{name}.kv_b_proj", heads * (plain + value), latent, "attention", "column", granule=plain + value)
    made += linear(f"{name}.o_proj", hidden, heads * value, "attention", "row", bias=bias, granule=value)
    index_size = 0
    if recipe.indexer:
        index_heads, each = fields.count("index_n_heads"), fields.count("index_head_dim")
        index_size = index_heads * each
        made += linear(f"{name}.indexer.wq_b", index_size, fields.count("q_lora_rank"), "attention")
        made += linear(f"{name}.indexer.wk", each, hidden, "attention")
        made += [vector(f"{name}.indexer.k_norm.{w}", each, "norm") for w in ("weight", "bias")]
        made += linear(f"{name}.indexer.weights_proj", index_heads, hidden, "attention")
    return made, Mixer("full", heads, heads, size, value, indexer=index_size)


# ------------------------------------------------------------------------------------------------- MLP and experts


def _inner_size(fields: Fields, recipe: Recipe, index: int) -> int:
    name, _, times = recipe.inner.partition("|")
    if times:
        return int(fields.get(name) or int(times) * fields.count("hidden_size"))
    inner = fields.per_layer(name, index)
    if recipe.linear == "conv" and recipe.moe is None and fields.get("block_auto_adjust_ff_dim", True):
        step, factor = fields.count("block_multiple_of", 256), fields.get("block_ffn_dim_multiplier", 1.0)
        inner = step * -(-int(factor * int(2 * inner / 3)) // step)
    if fields.get("use_double_wide_mlp") and _reuses_keys(fields, index):
        inner *= 2
    return inner


def _mlp(fields: Fields, recipe: Recipe, prefix: str, index: int) -> tuple[list[Param], int]:
    inner = _inner_size(fields, recipe, index)
    made = _mlp_params(fields, recipe, prefix + (f"{recipe.mlp}." if recipe.mlp else ""), inner, "mlp")
    if recipe.norms[0] == "attention_layernorm":  # Apertus: the activation learns two numbers
        made += [vector(f"{prefix}mlp.act_fn.{a}", 1, "mlp") for a in ("alpha_p", "alpha_n")]
    return made, inner


def _mlp_params(fields: Fields, recipe: Recipe, name: str, inner: int, part: str) -> list[Param]:
    hidden, bias = fields.count("hidden_size"), fields.flag(recipe.mlp_bias)
    *ups, down = recipe.mlp_names
    made: list[Param] = []
    for up in ups:
        made += linear(
            name + up, inner * (2 if recipe.mlp_fused else 1), hidden, part, "column", bias=bias,
            transposed=recipe.conv1d,
        )  # fmt: skip
    return made + linear(name + down, hidden, inner, part, "row", bias=bias, transposed=recipe.conv1d)


def _experts(fields: Fields, recipe: Recipe, moe: Moe, prefix: str) -> tuple[list[Param], int]:
    hidden, experts, inner = fields.count("hidden_size"), fields.count("experts"), fields.count(moe.inner)
    parent = recipe.mlp if moe.parent is None else moe.parent
    name = f"{prefix}{parent}." if parent else prefix
    made = linear(name + moe.router, experts, hidden, "router", bias=moe.router_bias)
    if moe.router_scale:
        made.append(vector(name + moe.router_scale, hidden, "router"))
    for extra in moe.extra:
        own, _, rows = extra.partition(":")
        made.append(Param(name + own, (int(rows), experts) if rows else (experts,), "router"))
    up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if moe.transposed:
        up, down = (experts, hidden, 2 * inner), (experts, inner, hidden)
    cut = (2, 1) if moe.transposed else (1, 2)
    own = name + moe.experts
    made.append(Param(f"{own}.gate_up_proj", up, "expert", cut[0], outputs=2 * inner))
    made.append(Param(f"{own}.down_proj", down, "expert", cut[1], outputs=hidden))
    if moe.expert_bias:
        made.append(Param(f"{own}.gate_up_proj_bias", (experts, 2 * inner), "expert", 1))
        made.append(Param(f"{own}.down_proj_bias", (experts, hidden), "expert"))
    if moe.shared and moe.shared.startswith("~"):  # beside the block, with two fused products
        shared, size = prefix + moe.shared[1:], int(fields.get(moe.shared_inner or "", 0))
        if size:
            made += linear(f"{shared}.input_linear", 2 * size, hidden, "shared", "column")
            made += linear(f"{shared}.output_linear", hidden, size, "shared", "row")
    elif moe.shared:
        size = int(fields.get(moe.shared_inner, 0)) if moe.shared_inner else 0
        if moe.shared_count:
            size = inner * int(fields.get(moe.shared_count, 0))
        if size:
            made += _mlp_params(fields, recipe, f"{name}{moe.shared}.", size, "shared")
    if moe.shared_gate:
        made += linear(f"{name}shared_expert_gate", 1, hidden, "shared")
    return made, inner


def _per_layer_embedding_params(fields: Fields, prefix: str) -> list[Param]:
    """Gemma 3n and 4: what a layer does with the embedding that each layer has of its own."""
    hidden, size, made = fields.count("hidden_size"), int(fields.get("hidden_size_per_layer_input", 0)), []
    streams, rank = int(fields.get("altup_num_inputs", 0)), int(fields.get("laurel_rank", 0))
    if streams:
        made.append(vector(f"{prefix}altup.correct_output_scale", hidden, "mlp"))
        made += linear(f"{prefix}altup.correction_coefs", streams, streams, "mlp")
        made += linear(f"{prefix}altup.prediction_coefs", streams * streams, streams, "mlp")
        made += linear(f"{prefix}altup.modality_router", streams, hidden, "mlp")
        made.append(vector(f"{prefix}altup.router_norm.weight", hidden, "norm"))
    if rank:
        made += linear(f"{prefix}laurel.linear_left", rank, hidden, "mlp")
        made += linear(f"{prefix}laurel.linear_right", hidden, rank, "mlp")
        made.append(vector(f"{prefix}laurel.post_laurel_norm.weight", hidden, "norm"))
    if size:
        made += linear(f"{prefix}per_layer_input_gate", size, hidden, "mlp")
        made += linear(f"{prefix}per_layer_projection", hidden, size, "mlp")
        made.append(vector(f"{prefix}post_per_layer_input_norm.weight", hidden, "norm"))
    return made
