"""Makes the models of these tests: tiny, with random weights. Runs in the engines' environment: `python models.py FOLDER`.

tiny          a Llama of two layers, with a tokenizer trained on this project's docs and a chat template
poems, sql    two LoRA adapters of it
window        a Gemma of which every second layer attends to a window of 128 tokens
tiny.gguf     the same kind of Llama for llama.cpp
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
END, START, STOP = MARKS = ("<|end|>", "<|start|>", "<|stop|>")
TEMPLATE: Final = (
    "{% for message in messages %}"
    + START
    + "{{ message.role }}\n"
    + "{% if message.content is string %}{{ message.content }}"
    + "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    + STOP
    + "\n{% endfor %}{% if add_generation_prompt %}"
    + START
    + "assistant\n{% endif %}"
)
VOCABULARY: Final = 3000
CONTEXT: Final = 8192
LAYERS: Final = 2
WIDTH: Final = 128
INNER: Final = 2 * WIDTH
HEADS: Final = 2
RANK: Final = 8  # of an adapter
SHAPE: Final[dict[str, Any]] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": CONTEXT,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=list(MARKS))
    found.train([str(page) for page in sorted(DOCS.glob("*.md"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token=START, eos_token=STOP, pad_token=END, chat_template=TEMPLATE)


def save(model: Any, words: PreTrainedTokenizerFast, folder: Path) -> None:
    model.float().save_pretrained(folder)
    words.save_pretrained(folder)


def special(words: PreTrainedTokenizerFast) -> dict[str, int]:
    """Returns the parts of a model's configuration that follow from its tokenizer."""
    return {
        "vocab_size": len(words),
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }


def llama(words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SHAPE, **special(words)))


def window(words: PreTrainedTokenizerFast) -> Gemma3ForCausalLM:
    layers = ["sliding_attention", "full_attention"] * LAYERS
    return Gemma3ForCausalLM(
        Gemma3TextConfig(num_hidden_layers=len(layers), layer_types=layers, sliding_window=128, **SHAPE, **special(words))
    )


def adapter(base: Path, folder: Path) -> None:
    """Makes a LoRA adapter of the base model."""
    folder.mkdir()
    modules = ("q_proj", "v_proj")
    shapes = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.{part}.weight": torch.randn(shape) / 10
        for layer in range(LAYERS)
        for module in modules
        for part, shape in shapes.items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": modules,
        "base_model_name_or_path": str(base),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def for_llama_cpp(words: PreTrainedTokenizerFast, file: Path) -> None:
    """Writes a Llama of the same shape as a GGUF file."""
    model = json.loads(words.backend_tokenizer.to_str())["model"]
    tokens = words.convert_ids_to_tokens(range(len(words)))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in MARKS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(words.bos_token_id)
    writer.add_eos_token_id(words.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(1)
    matrices = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH)}
    norms = ["output_norm"]
    for block in (f"blk.{layer}." for layer in range(LAYERS)):
        matrices |= {f"{block}attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        matrices |= {f"{block}ffn_{name}": (INNER, WIDTH) for name in ("gate", "up")}
        matrices[f"{block}ffn_down"] = (WIDTH, INNER)
        norms += [f"{block}attn_norm", f"{block}ffn_norm"]
    for name, shape in matrices.items():
        writer.add_tensor(f"{name}.weight", random.normal(scale=0.05, size=shape).astype(np.float32))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder: Path) -> None:
    torch.manual_seed(1)
    words = tokenizer()
    save(llama(words), words, folder / "tiny")
    save(window(words), words, folder / "window")
    for name in ("poems", "sql"):
        adapter(folder / "tiny", folder / name)
    for_llama_cpp(words, folder / "tiny.gguf")


main(Path(sys.argv[1]))
