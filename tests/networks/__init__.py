"""Drafter networks computed from scratch, in plain tensor algebra: no cache, no attention interface, no batch."""

import math

import torch

from hf_specdec.networks import AutoDrafter
from tests.toys import tiny_llama


__all__ = ["KINDS", "draft_logits", "drafter_for", "reference_logits", "rotary_frequencies", "small_target"]

# Options of the published variants, by name.
KINDS = {
    "eagle": {},
    "eagle3": {},
    "eagle3-reduced": {"draft_vocab_size": 40},
    "eagle3-norms": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "eagle3-3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 40},
    "eagle3-qwen3": {"qk_norm": True, "attention_bias": True},
}


def drafter_for(target, kind="eagle3", seed=0, scale=2.0):
    """An untrained drafter whose weights are `scale` times as large as torch's own; the seed decides everything."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        options = dict(KINDS[kind])
        family, size = kind.partition("-")[0], options.pop("draft_vocab_size", None)
        ids = None if size is None else torch.randperm(target.config.vocab_size)[:size]
        network = AutoDrafter.from_target(target, family, draft_token_ids=ids)
        if options:
            state, config = network.state_dict(), network.config
            for name, value in options.items():
                setattr(config, name, value)
            network = type(network)(config)
            network.load_state_dict(state, strict=False)
            network.attach(target)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif "self_attn" in name or name == "fc.weight":
                    parameter.mul_(scale)
    return network.eval()


def reference_logits(network, target, prefix, drafted=(), positions=None):
    """`(1 + len(drafted), vocab)`, the draft logits after `prefix` and after each drafted token, without any cache.

    `positions` are those of the features, 0, 1, ... by default.
    """
    config, text = network.config, torch.tensor([*prefix, *drafted])
    hidden = target(torch.tensor([list(prefix)]), output_hidden_states=True).hidden_states
    num_layers = target.config.num_hidden_layers
    family = "eagle3" if hasattr(network, "midlayer") else "eagle"
    taps = (num_layers,) if family == "eagle" else tuple(config.taps or (2, num_layers // 2, num_layers - 3))
    features = [hidden[index][0, : len(prefix) - 1] for index in taps]
    states = features[0] if family == "eagle" else _combine(network, features)
    logits = []
    for step in range(len(drafted) + 1):
        tokens = text[1 : len(prefix) + step]
        table = network.embed_tokens if config.has_embedding else target.get_input_embeddings()
        embeddings = table.weight[tokens]
        layer, places = _eagle if family == "eagle" else _eagle3, torch.arange(len(states))
        recurring, readable = layer(network, embeddings, states, places if positions is None else positions)
        states = torch.cat([states, recurring[-1:]])
        head = network.lm_head if family == "eagle3" and config.has_head else target.get_output_embeddings()
        logits.append(_spread(network, head.weight @ readable[-1]))
    return torch.stack(logits)


def draft_logits(draft, row):
    """The logits a draft reports for one row's real drafts."""
    return draft.logits[row, : int(draft.lengths[row])]


def _combine(network, features):
    if network.config.fc_norm:
        features = [_norm(each, norm) for each, norm in zip(features, network.fc_norm, strict=True)]
    wide = torch.cat(features, -1)
    if network.config.norm_before_fc:
        wide = _norm(wide, network.input_norm)
    return wide @ network.fc.weight.T


def _eagle(network, embeddings, states, positions):
    layer = network.layers[0]
    x = torch.cat([embeddings, states], -1) @ network.fc.weight.T
    if network.config.bias:
        x = x + network.fc.bias
    x = x + _attend(layer.self_attn, x, network.config, positions)
    x = x + _mlp(layer.mlp, _norm(x, layer.post_attention_layernorm))
    return x, x


def _eagle3(network, embeddings, states, positions):
    layer, config = network.midlayer, network.config
    normed = _norm(states, layer.hidden_norm)
    x = torch.cat([_norm(embeddings, layer.input_layernorm), normed], -1)
    x = (normed if config.norm_before_residual else states) + _attend(layer.self_attn, x, config, positions)
    x = x + _mlp(layer.mlp, _norm(x, layer.post_attention_layernorm))
    readable = _norm(x, network.norm)
    return (readable if config.norm_output else x), readable


def _attend(attention, x, config, positions):
    """Causal attention with rotary positions, head by head."""
    size, length = config.head_dim, len(x)
    group = config.num_attention_heads // config.num_key_value_heads
    q, k, v = (_linear(x, layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    heads = []
    for head in range(config.num_attention_heads):
        own, shared = slice(head * size, (head + 1) * size), slice(head // group * size, (head // group + 1) * size)
        query, key = q[:, own], k[:, shared]
        if hasattr(attention, "q_norm"):
            query, key = _norm(query, attention.q_norm), _norm(key, attention.k_norm)
        query, key = (_rotate(each, config, positions) for each in (query, key))
        scores = query @ key.T / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, shared])
    return _linear(torch.cat(heads, -1), attention.o_proj)


def _rotate(x, config, positions):
    frequencies, factor = rotary_frequencies(config.rope_parameters, config.head_dim, int(positions.max()) + 1)
    angles, half = positions[:, None] * frequencies, x.shape[-1] // 2
    cos, sin, first, second = angles.cos() * factor, angles.sin() * factor, x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotary_frequencies(parameters, size, length=0):
    """`(size / 2,)` frequencies for texts of `length` tokens, and the factor on sine and cosine, written from the papers."""
    base = [parameters["rope_theta"] ** (-2 * index / size) for index in range(size // 2)]
    kind, factor = parameters["rope_type"], parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    if kind == "default":
        return torch.tensor(base), 1.0
    if kind == "linear":
        return torch.tensor([each / factor for each in base]), 1.0
    if kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        smooth = [
            (original * each / (2 * math.pi) - low) / (high - low) for each in base
        ]  # turns in the original length
        kept = [min(max(each, 0.0), 1.0) for each in smooth]
        return torch.tensor([each * (k + (1 - k) / factor) for each, k in zip(base, kept, strict=True)]), 1.0
    if kind == "yarn":  # arXiv 2309.00071
        first, last = (
            size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))
            for turns in (32, 1)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
        kept = [1 - min(max((index - first) / (last - first), 0.0), 1.0) for index in range(size // 2)]
        frequencies = [each * (k + (1 - k) / factor) for each, k in zip(base, kept, strict=True)]
        return torch.tensor(frequencies), 0.1 * math.log(factor) + 1
    if kind == "longrope":  # arXiv 2402.13753
        stretched = parameters["long_factor" if length > original else "short_factor"]
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
        return torch.tensor([each / s for each, s in zip(base, stretched, strict=True)]), scale
    raise NotImplementedError(kind)


def _mlp(mlp, x):
    return (torch.nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


def _norm(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def _linear(x, layer):
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def _spread(network, logits):
    if not hasattr(network, "d2t"):
        return logits
    everywhere = torch.full((len(network.t2d),), -torch.inf)
    for draft_id, offset in enumerate(network.d2t.tolist()):
        everywhere[draft_id + offset] = logits[draft_id]
    return everywhere


def small_target(**options):
    """A target of six layers, so that the three taps differ."""
    return tiny_llama(layers=6, **options)


def scale_logits(target):
    """Makes a target do more to its logits than its head does."""
    plain = target.forward

    def scaled(*args, **kwargs):
        outputs = plain(*args, **kwargs)
        outputs.logits = 0.5 * outputs.logits
        return outputs

    target.forward = scaled
