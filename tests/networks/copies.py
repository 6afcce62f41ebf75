"""Targets and drafters made so that the drafter is always right: every weight is written down."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.networks import AutoDrafter


__all__ = ["FIRST", "SIZE", "attending_pair", "overfit", "recalling_pair"]

SIZE, VOCAB_SIZE = 32, 64
FIRST = 1  # the first token of every text


def _target(theta):
    """Unit-RMS embeddings, so that the norms before the layer change nothing; no weight in any norm."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=SIZE, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, initializer_range=0.3, rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    table = model.get_input_embeddings().weight.data
    table[0].normal_()  # the padding token's row is zero
    table[:, 2:] *= ((SIZE - 1) / table[:, 2:].pow(2).sum(-1, keepdim=True)).sqrt()
    table[:, 0], table[:, 1] = 1.0, 0.0  # two constants: every token but the first, and the first
    table[FIRST, 0], table[FIRST, 1] = 0.0, 1.0
    model.get_output_embeddings().weight.data[[0, FIRST]] = 0.0  # never the best token, so never generated
    return model


def attending_pair(seed=0):
    """EAGLE-1 and a target of one layer that attends to everything but the first token, which the drafter never sees."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = _target(theta=1e8)
        attention = model.model.layers[0].self_attn
        for head in range(4):  # the slowest pair of each head is a constant that pushes the first token away
            attention.q_proj.weight[head * 8 + 3] = 0
            attention.k_proj.weight[head * 8 + 3] = 0
            attention.q_proj.weight[head * 8 + 7] = 0
            attention.k_proj.weight[head * 8 + 7] = 0
            attention.q_proj.weight[head * 8 + 3, 0] = 30.0
            attention.k_proj.weight[head * 8 + 3, 1] = -30.0
        drafter = AutoDrafter.from_target(model, "eagle")
        drafter.fc.weight.copy_(torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], 1))
        drafter.layers[0].load_state_dict(model.model.layers[0].state_dict(), strict=False)
    return model, drafter


def recalling_pair(seed=0):
    """EAGLE-3 and a target whose next token depends on the last one through its MLP.

    The drafter's heads attend to their own column and carry the embedding over in place of the residual.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = _target(theta=100.0)
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        drafter = AutoDrafter.from_target(model, "eagle3", taps=[0, 1, 1])
        config = drafter.config
        config.norm_before_residual = True
        drafter = type(drafter)(config).eval()
        drafter.attach(model)
        layer, attention = drafter.midlayer, drafter.midlayer.self_attn
        layer.hidden_norm.weight.zero_()
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
            for head in range(4):
                projection.weight[head * 8 : head * 8 + 4, 0] = 40.0
        attention.v_proj.weight.copy_(torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], 1))
        attention.o_proj.weight.copy_(torch.eye(SIZE))
        layer.mlp.load_state_dict(model.model.layers[0].mlp.state_dict())
        drafter.lm_head.weight.copy_(model.get_output_embeddings().weight)
    return model, drafter


def overfit(network, target, sequences, mask, steps=120):
    """Trains a network on a few texts of its target, with the target's features, until it is often right there."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        outputs = target(sequences, attention_mask=mask, position_ids=positions, output_hidden_states=True)
        features = torch.cat([outputs.hidden_states[index] for index in network.taps_of(target)], -1)[:, :-2]
        places = torch.full((target.config.vocab_size,), -100)
        ids = network.target_ids if hasattr(network, "target_ids") else torch.arange(target.config.vocab_size)
        places[ids] = torch.arange(len(ids))
    labels = torch.where(mask[:, :-2] == 1, places[sequences[:, 2:]], -100)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    with torch.enable_grad():
        for _ in range(steps):
            logits = network(
                sequences[:, 1:-1],
                network.combine(features),
                attention_mask=mask[:, :-2],
                position_ids=positions[:, :-2],
            ).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network.requires_grad_(False)
