"""Tiny random models as ordinary Hugging Face folders: real architectures, a real byte-level tokenizer, a real chat template.

    folder = tiny_llama(tmp_path / "llama")            # ~100k parameters, under half a second
    model = AutoModelForCausalLM.from_pretrained(folder)

The tokenizer is trained here on a fixed text, so every run gives the same ids. Any string round-trips (byte level).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without tools; like SmolLM2's template, but without the default system prompt."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_TEXT = """You are a helpful assistant. The user asks a question and the assistant answers it with a tool call.
{"name": "get_weather", "arguments": {"city": "Paris"}} <tool_call> </tool_call> <think> </think> system user assistant tool
What is the weather in the city? How much is two plus two? The result is four. Search, read, write, send the mail.
def add(a, b): return a + b  # numbers 0 1 2 3 4 5 6 7 8 9
"""


def tiny_tokenizer(*, vocab_size: int = 384, chat_template: str | None = CHATML) -> Any:
    """A byte-level BPE tokenizer (256 bytes, 3 special tokens, the rest merges); end of turn is `<|im_end|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


def _save(config: Any, auto_class: Any, folder: Path, tokenizer: Any, seed: int) -> Path:
    import torch

    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _sizes(layers: int, hidden: int, vocab_size: int, spread: float) -> dict[str, Any]:
    """Common sizes: 4 query heads on 2 KV heads, context 2,048. `spread` is the weights' standard deviation."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "initializer_range": spread,
        "tie_word_embeddings": True,
    }


def tiny_llama(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    vocab_size: int = 384,
    seed: int = 0,
    spread: float = 0.1,
    chat_template: str | None = CHATML,
) -> Path:
    """A random Llama. `spread=0.1` gives clearly non-uniform next-token distributions; `chat_template=None` leaves it out."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = tiny_tokenizer(vocab_size=vocab_size, chat_template=chat_template)
    return _save(LlamaConfig(**_sizes(layers, hidden, vocab_size, spread)), AutoModelForCausalLM, folder, tokenizer, seed)


def tiny_without_template(folder: Path, *, seed: int = 0) -> Path:
    """A random Llama whose tokenizer has no chat template at all."""
    return tiny_llama(folder, seed=seed, chat_template=None)


def tiny_qwen3(folder: Path, *, layers: int = 2, hidden: int = 64, vocab_size: int = 384, seed: int = 0, spread: float = 0.1) -> Path:
    """A random Qwen3 (query and key norms) with Qwen3's own chat template, which knows tools and strips earlier thinking."""
    import trl
    from transformers import AutoModelForCausalLM, Qwen3Config

    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer = tiny_tokenizer(vocab_size=vocab_size, chat_template=template)
    return _save(Qwen3Config(**_sizes(layers, hidden, vocab_size, spread)), AutoModelForCausalLM, folder, tokenizer, seed)


def tiny_sliding_window(folder: Path, *, layers: int = 2, window: int = 8, seed: int = 0, spread: float = 0.1) -> Path:
    """A random Mistral whose attention sees only the last `window` tokens: it cannot share prefixes or slots."""
    from transformers import AutoModelForCausalLM, MistralConfig

    tokenizer = tiny_tokenizer()
    config = MistralConfig(**_sizes(layers, 64, len(tokenizer), spread), sliding_window=window)
    return _save(config, AutoModelForCausalLM, folder, tokenizer, seed)


def tiny_encoder_decoder(folder: Path, *, seed: int = 0) -> Path:
    """A random T5: refused everywhere."""
    from transformers import AutoModelForSeq2SeqLM, T5Config

    tokenizer = tiny_tokenizer()
    config = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0)
    return _save(config, AutoModelForSeq2SeqLM, folder, tokenizer, seed)


def tiny_gguf(file: Path, llama: Path) -> Path:
    """The same model and tokenizer as the folder `llama` (made by `tiny_llama`), as an fp32 GGUF file."""
    import json

    import gguf
    from safetensors.numpy import load_file

    config = json.loads((llama / "config.json").read_text())
    tokenizer = json.loads((llama / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token, _ in vocabulary])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(config["pad_token_id"])
    if (template := llama / "chat_template.jinja").exists():
        writer.add_chat_template(template.read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(llama / "model.safetensors").items():
        count = heads if "q_proj" in name else kv_heads if "k_proj" in name else None
        if count:  # llama.cpp keeps the two halves of each head's rotary dimensions interleaved
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape).copy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
