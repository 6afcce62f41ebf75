"""Rotary tables: in single precision whatever the weights are cast to, and of every kind that a target may have."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import InvalidConfigError
from hf_specdec.networks import AutoDrafter
from hf_specdec.networks.exit_heads import ExitHeads
from hf_specdec.networks.rotary import DraftRotaryEmbedding, rotary_like
from tests.networks import drafter_for, reference_logits, small_target


POSITION = 3000
THETA, SIZE = 10000.0, 8
HALF = [torch.bfloat16, torch.float16]


def default_frequencies(theta=THETA, size=SIZE):
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float) / size)


def tables_of(network):
    return dict(network.rotary_emb.named_buffers())


def assert_whole(network):
    """Both tables are those of a network that was never cast."""
    tables = tables_of(network)
    assert sorted(tables) == ["inv_freq", "original_inv_freq"]
    for table in tables.values():
        assert table.dtype == torch.float32
        assert torch.equal(table.cpu(), default_frequencies())


def saved_in(folder, kind, dtype):
    """A drafter that is saved in `dtype`."""
    network = drafter_for(small_target(), kind)
    tensors = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in network.state_dict().items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(network.config.to_dict() | {"target_weights": None}))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("stored", [*HALF, torch.float32])
@pytest.mark.parametrize("wanted", [*HALF, torch.float32])
def test_loading_keeps_the_tables(stored, wanted, tmp_path):
    folder = saved_in(tmp_path / "drafter", "eagle3", stored)
    network = AutoDrafter.from_pretrained(folder, target=small_target().to(wanted))
    assert network.dtype == wanted
    assert_whole(network)
    assert_whole(AutoDrafter.from_target(small_target().to(wanted), "eagle"))


@pytest.mark.parametrize(
    "cast",
    [
        lambda network: network.half().float(),
        lambda network: network.bfloat16(),
        lambda network: network.to("cpu", torch.float16),
        lambda network: network.to(dtype=torch.bfloat16).to(torch.float32),
        lambda network: network.double(),
        lambda network: copy.deepcopy(network.half()),
        lambda network: network.half().twin(),
    ],
)
def test_casts_keep_the_tables(cast):
    assert_whole(cast(drafter_for(small_target())))


def test_tables_move_between_devices():
    network = drafter_for(small_target()).to("meta", torch.bfloat16)
    assert {table.device.type for table in tables_of(network).values()} == {"meta"}


@pytest.mark.parametrize("dtype", HALF)
def test_casts_keep_the_tables_of_exit_heads(dtype):
    heads = ExitHeads.for_target(small_target(), "adapter", [2]).to(dtype)
    assert heads.dtype == dtype
    assert_whole(heads.head(2))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_logits_far_into_a_text(kind, tmp_path):
    """Those of a bf16 checkpoint at position 3000, with every phase computed in single precision from the config."""
    target = small_target()
    folder = saved_in(tmp_path / "drafter", kind, torch.bfloat16)
    network = AutoDrafter.from_pretrained(folder, target=target)
    text = torch.randint(64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    near = reference_logits(network, target, text)[0]
    hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[tap] for tap in network.taps_of(target)], -1)[:, :-1]
    # The first tokens stay where they are and the later ones are 3000 tokens further on: phases are not those near zero.
    positions = torch.arange(len(text) - 1)
    positions[8:] += POSITION
    with torch.no_grad():
        far = network(
            torch.tensor([text[1:]]), network.combine(features), torch.ones(1, len(positions)), positions[None]
        ).logits[0, -1]
        expected = reference_logits(network, target, text, positions=positions)[0]
    assert (near - expected).abs().max() > 1e-2  # the distance does matter
    torch.testing.assert_close(network.to_target_vocabulary(far), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_phases_of_a_half_precision_network(dtype):
    """The phase is right to single precision; its sine and cosine are then rounded, as in transformers."""
    network = drafter_for(small_target()).to(dtype)
    positions = torch.tensor([[0, 1, POSITION]])
    cos, sin = network.rotary_emb(torch.zeros(1, 3, 1, dtype=dtype), position_ids=positions)
    angles = positions[..., None] * default_frequencies()
    assert torch.equal(cos[..., : SIZE // 2], angles.cos().to(dtype))
    assert torch.equal(sin[..., SIZE // 2 :], angles.sin().to(dtype))


def test_it_is_initialised_like_transformers_own():
    """transformers knows tables by the class's name, for networks that are made on the meta device."""
    assert "RotaryEmbedding" in DraftRotaryEmbedding.__name__
    network = drafter_for(small_target())
    with torch.device("meta"):
        empty = type(network)(network.config)
    empty.to_empty(device="cpu")
    empty.init_weights()
    assert_whole(empty)


# --- the target's own kinds -----------------------------------------------------------------------------------------

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}


def like(kind, **options):
    """A target with rotary parameters of one kind."""
    return small_target(rope_parameters=ROPES[kind] | {"rope_theta": THETA} | options)


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("kind", ROPES)
def test_the_kinds_of_targets(kind, family, tmp_path):
    """Kept with the checkpoint, and logits as from the papers' formulas, in short and in long texts."""
    target = like(kind)
    drafter_for(target, family).save_pretrained(tmp_path / "drafter")
    network = AutoDrafter.from_pretrained(tmp_path / "drafter", target=target)
    assert network.config.rope_parameters == ROPES[kind] | {"rope_theta": THETA}
    plain = drafter_for(small_target(), family)
    for length in (12, 40):
        text = torch.randint(64, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        with torch.no_grad():
            hidden = target(torch.tensor([text]), output_hidden_states=True).hidden_states
            features = torch.cat([hidden[tap] for tap in network.taps_of(target)], -1)[:, :-1]
            logits, other = (
                each.to_target_vocabulary(each(torch.tensor([text[1:]]), each.combine(features)).logits[0, -1])
                for each in (network, plain)
            )
            torch.testing.assert_close(logits, reference_logits(network, target, text)[0], atol=1e-5, rtol=1e-5)
        assert (logits - other).abs().max() > 1e-3  # the kind does matter


def test_what_is_not_about_the_layer_is_left_out():
    assert rotary_like(None) == rotary_like({}) == {"rope_type": "default", "rope_theta": 10000.0}
    linear = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    others = {"mrope_section": [1, 2, 3], "alpha": 3.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}
    assert rotary_like(linear | others) == linear
    assert (
        rotary_like({"sliding_attention": {"rope_type": "default", "rope_theta": 1.0}, "full_attention": linear})
        == linear
    )
    assert rotary_like({"full_attention": None, "sliding_attention": linear}) == linear
    proportional = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert rotary_like(proportional) == proportional


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "ntk_alpha", "rope_theta": THETA, "alpha": 2.0}, "of the type 'ntk_alpha'"),
        (
            ROPES["longrope"] | {"short_factor": [1.0, 2.0, 3.0], "long_factor": [1.0, 2.0, 3.0]},
            "with 3 numbers in long_factor for heads of 8",
        ),
    ],
)
def test_other_kinds_are_refused_by_name(rope, message):
    target = small_target()
    target.config.rope_parameters = rope | {"rope_theta": THETA}
    for make in (
        lambda: AutoDrafter.from_target(target, "eagle"),
        lambda: AutoDrafter.from_target(target),
        lambda: ExitHeads.for_target(target, "adapter", [2]),
    ):
        with pytest.raises(InvalidConfigError, match=f"{message}.*expected one of the types default.*yarn"):
            make()
    assert ExitHeads.for_target(target, "linear", [2]).config.kind == "linear"
