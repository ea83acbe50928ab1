"""HostedModel on tiny real models: what is active, what has gradients, what is written to disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_llama

from apprentice.core.config import AdapterConfig
from apprentice.core.errors import CheckpointCorrupt, ConfigError, Conflict, ModelRefused, UnknownModel
from apprentice.core.training.base_models import ResolvedBase
from apprentice.core.training.policy import HostedModel

SMALL = AdapterConfig(rank=4, alpha=8)
IDS_BT = torch.tensor([[5, 9, 77, 130, 4, 200, 31, 8]])


@pytest.fixture
def host(tiny_llama_folder: Path) -> HostedModel:
    return HostedModel.load(ResolvedBase("tiny", tiny_llama_folder, "0" * 64))


def logits(host: HostedModel, name: str | None) -> torch.Tensor:
    with host.using(name) as model, torch.no_grad():
        return model(input_ids=IDS_BT.to(host.device)).logits.clone()


def scramble(host: HostedModel, name: str, seed: int = 1) -> None:
    """Give an adapter weights that change the model's outputs clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in host.adapter_parameters(name).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def weights(host: HostedModel, name: str) -> dict[str, torch.Tensor]:
    return {key: parameter.detach().clone() for key, parameter in host.adapter_parameters(name).items()}


def with_gradients(host: HostedModel) -> set[str]:
    return {name for name, parameter in host.model.named_parameters() if parameter.requires_grad}


def test_a_fresh_adapter_changes_nothing(host: HostedModel) -> None:
    before = logits(host, None)
    host.add_adapter("p/a@0", SMALL, seed=0)
    assert torch.equal(logits(host, "p/a@0"), before)
    assert torch.equal(logits(host, None), before)


def test_exactly_the_named_adapter_is_active(host: HostedModel) -> None:
    base = logits(host, None)
    for seed, name in enumerate(("a.b/c@3", "a.b/c@31", "a.b/c"), start=1):
        host.add_adapter(name, SMALL, seed=seed)
        scramble(host, name, seed)
    seen = {name: logits(host, name) for name in host.adapters()}
    assert not any(torch.allclose(one, base, atol=1e-3) for one in seen.values())
    assert not torch.allclose(seen["a.b/c@3"], seen["a.b/c@31"], atol=1e-3)
    assert torch.equal(logits(host, None), base)
    assert all(torch.equal(logits(host, name), seen[name]) for name in ("a.b/c", "a.b/c@31", "a.b/c@3"))


def test_adding_and_dropping_adapters_leaves_the_others_untouched(host: HostedModel) -> None:
    host.add_adapter("kept", SMALL, seed=1)
    scramble(host, "kept")
    kept_weights, kept_logits, base = weights(host, "kept"), logits(host, "kept"), logits(host, None)
    host.add_adapter("other", AdapterConfig(rank=2, target_modules=("q_proj",)), seed=2)
    scramble(host, "other", 5)
    assert torch.equal(logits(host, "kept"), kept_logits)
    host.drop_adapter("other")
    assert host.adapters() == {"kept"}
    assert torch.equal(logits(host, "kept"), kept_logits)
    assert all(torch.equal(kept_weights[key], value) for key, value in weights(host, "kept").items())
    host.drop_adapter("kept")
    assert torch.equal(logits(host, None), base)
    host.add_adapter("kept", SMALL, seed=3)
    scramble(host, "kept")
    assert torch.equal(logits(host, "kept"), kept_logits)


def test_first_weights_depend_on_the_seed_alone_and_leave_the_global_random_state(host: HostedModel) -> None:
    torch.manual_seed(123)
    host.add_adapter("first", SMALL, seed=7)
    after_first = torch.rand(3)
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(999)
    host.add_adapter("second", SMALL, seed=7)
    host.add_adapter("third", SMALL, seed=8)
    assert torch.equal(after_first, expected)
    first, second, third = (weights(host, name) for name in ("first", "second", "third"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not any(torch.equal(first[key], third[key]) for key in first if ".lora_A." in key)


def test_parameters_have_one_stable_order_and_the_names_of_the_saved_file(host: HostedModel, tmp_path: Path) -> None:
    host.add_adapter("x", SMALL, seed=0)
    host.add_adapter("y", SMALL, seed=0)
    assert list(host.adapter_parameters("x")) == list(host.adapter_parameters("y"))
    host.save_adapter("x", tmp_path)
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == set(host.adapter_parameters("x"))
    assert len(host.adapter_parameters("x")) == 2 * 2 * 7


def test_gradients_are_on_for_the_adapter_in_use_only_if_it_is_trainable(host: HostedModel) -> None:
    host.add_adapter("trained", SMALL, seed=1)
    host.add_adapter("frozen", SMALL, seed=2, trainable=False)
    with host.using("trained") as model:
        assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in host.adapter_parameters("trained").values()}
        model(input_ids=IDS_BT).logits.logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in host.adapter_parameters("trained").values())
    assert all(parameter.grad is None for parameter in host.adapter_parameters("frozen").values())
    with host.using("frozen"):
        assert with_gradients(host) == set()
    with host.using(None):
        assert with_gradients(host) == set()
    assert host.trainable_parameters("trained") == sum(p.numel() for p in host.adapter_parameters("trained").values()) > 0
    assert host.trainable_parameters("frozen") == 0


def test_a_nested_choice_gives_the_outer_one_back(host: HostedModel) -> None:
    host.add_adapter("outer", SMALL, seed=1)
    scramble(host, "outer")
    expected, base = logits(host, "outer"), logits(host, None)
    with host.using("outer") as model, torch.no_grad():
        with host.using(None) as same:
            assert torch.equal(same(input_ids=IDS_BT).logits, base)
        with pytest.raises(TypeError), host.using(None) as same:
            same(nonsense=object(), input_ids="not a tensor")
        host.add_adapter("added meanwhile", SMALL, seed=3)
        assert torch.equal(model(input_ids=IDS_BT).logits, expected)
        with pytest.raises(Conflict, match="'outer' is in use"):
            host.drop_adapter("outer")
        host.drop_adapter("added meanwhile")
        assert torch.equal(model(input_ids=IDS_BT).logits, expected)


def test_two_threads_never_see_each_others_adapter(host: HostedModel) -> None:
    names: list[str | None] = ["a", "b", None]
    for seed, name in enumerate(("a", "b")):
        host.add_adapter(name, SMALL, seed=seed)
        scramble(host, name, seed + 1)
    expected = {name: logits(host, name) for name in names}
    wrong: list[str | None] = []

    def work(name: str | None) -> None:
        wrong.extend(name for _ in range(20) if not torch.equal(logits(host, name), expected[name]))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_dropout_runs_only_when_asked_and_only_in_the_adapter(host: HostedModel) -> None:
    host.add_adapter("d", AdapterConfig(rank=4, dropout=0.5), seed=0)
    scramble(host, "d")
    calm = logits(host, "d")
    with host.using("d", dropout=True) as model, torch.no_grad():
        noisy = [model(input_ids=IDS_BT).logits for _ in range(2)]
        assert not model.training
    assert not torch.equal(noisy[0], noisy[1])
    assert torch.equal(logits(host, "d"), calm)


def test_a_saved_adapter_gives_identical_log_probs_in_plain_peft(host: HostedModel, tmp_path: Path, tiny_llama_folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    host.add_adapter("a.b/c@3", SMALL, seed=0)
    scramble(host, "a.b/c@3")
    host.save_adapter("a.b/c@3", tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_llama_folder)
    assert config["target_modules"] == sorted(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"]), tmp_path).eval()
    with torch.no_grad():
        expected = plain(input_ids=IDS_BT).logits.log_softmax(-1)
    assert torch.equal(logits(host, "a.b/c@3").log_softmax(-1), expected)


def test_a_saved_adapter_loads_back_bit_for_bit_and_frozen(host: HostedModel, tmp_path: Path) -> None:
    host.add_adapter("trained", SMALL, seed=0)
    scramble(host, "trained")
    host.save_adapter("trained", tmp_path / "one")
    host.load_adapter("served@1", tmp_path / "one")
    assert torch.equal(logits(host, "served@1"), logits(host, "trained"))
    assert host.adapter_config("served@1").rank == 4
    assert not host.is_trainable("served@1")
    host.save_adapter("served@1", tmp_path / "two")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    scramble(host, "trained", seed=9)
    assert not torch.equal(logits(host, "served@1"), logits(host, "trained"))


def test_an_adapter_made_by_plain_peft_loads(host: HostedModel, tmp_path: Path, tiny_llama_folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama_folder), LoraConfig(r=3, target_modules=["v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        expected = model.eval()(input_ids=IDS_BT).logits
    model.save_pretrained(tmp_path)
    host.load_adapter("theirs", tmp_path, trainable=True)
    assert torch.equal(logits(host, "theirs"), expected)
    assert host.adapter_config("theirs").target_modules == ("v_proj",)


def test_adapter_weights_are_fp32_on_a_bf16_base_and_fp64_on_an_fp64_base(tiny_llama_folder: Path) -> None:
    base = ResolvedBase("tiny", tiny_llama_folder, "0" * 64)
    for dtype, expected in (("bfloat16", torch.float32), ("float64", torch.float64)):
        host = HostedModel.load(base, dtype=dtype)
        host.add_adapter("a", SMALL, seed=0)
        assert {p.dtype for p in host.adapter_parameters("a").values()} == {expected}
        assert host.model.model.embed_tokens.weight.dtype == getattr(torch, dtype)


def test_the_base_weights_exist_once_and_never_train(host: HostedModel, tiny_llama_folder: Path) -> None:
    stored = load_file(tiny_llama_folder / "model.safetensors")
    pointer = host.model.model.layers[0].mlp.up_proj.weight.data_ptr()
    for number in range(3):
        host.add_adapter(f"a{number}", SMALL, seed=number)
        scramble(host, f"a{number}")
    with host.using("a1") as model:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(input_ids=IDS_BT).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    layer = host.model.model.layers[0].mlp.up_proj
    assert layer.base_layer.weight.data_ptr() == pointer
    assert torch.equal(layer.base_layer.weight, stored["model.layers.0.mlp.up_proj.weight"])
    held = sum(p.numel() for p in host.model.parameters())
    adapters = sum(p.numel() for number in range(3) for p in host.adapter_parameters(f"a{number}").values())
    assert held - adapters == sum(tensor.numel() for tensor in stored.values())


def test_attention_is_switched_for_a_while_and_back(host: HostedModel) -> None:
    before = host.model.config._attn_implementation
    expected = logits(host, None)
    for _ in range(2):
        with host.attention("eager"):
            assert host.model.config._attn_implementation == "eager"
            assert torch.allclose(logits(host, None), expected, atol=1e-4)
        assert host.model.config._attn_implementation == before
    with pytest.raises(UnknownModel), host.attention("eager"):
        logits(host, "nobody")
    assert host.model.config._attn_implementation == before == "sdpa"
    with pytest.raises(ConfigError, match="'no-such' is not a registered attention"), host.attention("no-such"):
        pass


def test_context_length_is_the_models(host: HostedModel) -> None:
    assert host.context_length == 2048


@pytest.mark.parametrize(
    ("targets", "said"), [(("q_proj", "nonsense"), "'nonsense'"), (("lm_head",), "'lm_head'"), (("embed_tokens",), "'embed_tokens'")]
)
def test_targets_that_match_no_linear_layer_are_named_with_what_there_is(host: HostedModel, targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        host.add_adapter("a", AdapterConfig(target_modules=targets), seed=0)
    assert host.adapters() == frozenset()


def test_no_targets_at_all_are_refused(host: HostedModel) -> None:
    with pytest.raises(ConfigError, match="at least one module"):
        host.add_adapter("a", AdapterConfig(target_modules=()), seed=0)


def test_a_full_name_targets_one_layer(host: HostedModel) -> None:
    host.add_adapter("a", AdapterConfig(rank=2, target_modules=("model.layers.1.self_attn.q_proj",)), seed=0)
    assert list(host.adapter_parameters("a")) == [
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
    ]


def test_taken_unknown_and_empty_names_are_refused(host: HostedModel) -> None:
    host.add_adapter("a", SMALL, seed=0)
    with pytest.raises(Conflict, match="'a' is already loaded"):
        host.add_adapter("a", SMALL, seed=0)
    with pytest.raises(ConfigError, match="must not be empty"):
        host.add_adapter("", SMALL, seed=0)
    for call in (host.drop_adapter, host.adapter_parameters, host.adapter_config, host.trainable_parameters):
        with pytest.raises(UnknownModel, match="'b' is not loaded; loaded: a"):
            call("b")
    with pytest.raises(UnknownModel), host.using("b"):
        pass


def saved(host: HostedModel, folder: Path) -> Path:
    host.add_adapter("good", SMALL, seed=0)
    host.save_adapter("good", folder)
    return folder


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peft_type": "IA3"}, "must be a LoRA adapter"),
        ({"r": 5}, "has shape"),
        ({"r": 0}, "rank"),
        ({"r": "many"}, "rank"),
        ({"target_modules": ["q_proj"]}, "has a weight that this base model has no place for"),
        ({"target_modules": ["c_attn"]}, "'c_attn'"),
        ({"target_modules": ".*proj"}, "by a pattern"),
        ({"target_modules": 7}, "values that no LoRA adapter can have"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_leaves_nothing(
    host: HostedModel, tmp_path: Path, values: dict[str, object], said: str
) -> None:
    edit_config(saved(host, tmp_path), **values)
    expected = logits(host, "good")
    with pytest.raises(ConfigError, match=said):
        host.load_adapter("bad", tmp_path)
    assert host.adapters() == {"good"}
    assert torch.equal(logits(host, "good"), expected)


def test_an_adapter_of_a_larger_model_is_refused_with_both_shapes(host: HostedModel, tmp_path: Path) -> None:
    larger = HostedModel.load(ResolvedBase("large", tiny_llama(tmp_path / "large", hidden=128), "1" * 64))
    with pytest.raises(ConfigError, match=r"shape \(4, 128\), expected \(4, 64\)"):
        host.load_adapter("bad", saved(larger, tmp_path / "adapter"))


def test_an_adapter_with_values_that_are_not_finite_is_refused(host: HostedModel, tmp_path: Path) -> None:
    file = saved(host, tmp_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="not finite"):
        host.load_adapter("bad", tmp_path)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_missing_or_cut_adapter_files_are_named(host: HostedModel, tmp_path: Path, file: str) -> None:
    path = saved(host, tmp_path) / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointCorrupt, match=file):
        host.load_adapter("bad", tmp_path)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match=f"has no {file}"):
        host.load_adapter("bad", tmp_path)


@pytest.mark.parametrize(("options", "said"), [({"dtype": "int8"}, "dtype must be one of"), ({"device": "quantum"}, "'quantum'")])
def test_unknown_dtype_and_device_are_refused(tiny_llama_folder: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HostedModel.load(ResolvedBase("tiny", tiny_llama_folder, "0" * 64), **options)


def test_a_base_with_a_missing_weight_is_refused_and_never_filled_with_random_numbers(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        HostedModel.load(ResolvedBase("m", folder, "0" * 64))
