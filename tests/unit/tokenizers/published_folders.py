"""Small tokenizer folders in every form that published models have, as data: which files, with which settings."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "Words, numbers like 12345 and 67, accents like café, 漢字 and emoji 🎉 too. Hello world, it's we'll they're",
    "for i in range(10):\n    print(i)\n\n\n# indented   code\t\twith tabs",
    "système élan naïve Straße ＡＢＣ ﬁne",
]
Token = Mapping[str, Any]


def token(content: str, **flags: bool) -> dict[str, Any]:
    """A token as the files describe one."""
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **usual, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    """A token as older tokenizer_config.json files describe one."""
    return {"__type": "AddedToken", **token(content, **flags)}


@cache
def byte_level(*special: str, first: bool = True) -> str:
    """tokenizer.json of a byte-level BPE; the special tokens come before or behind the pieces."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=list(special) if first else [], show_progress=False, initial_alphabet=alphabet
    )
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    if not first:
        pipeline.add_special_tokens(list(special))
    return pipeline.to_str()


@cache
def sentencepiece_model(kind: str, symbols: tuple[str, ...] = (), **settings: Any) -> bytes:
    """A SentencePiece model; ``settings``: the trainer's."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=written,
        model_type=kind,
        vocab_size=settings.pop("vocab_size", 420 if settings.get("byte_fallback") else 160),
        hard_vocab_limit=False,
        minloglevel=2,
        user_defined_symbols=list(symbols),
        **settings,
    )
    return written.getvalue()


def llama_model(*symbols: str) -> bytes:
    """As Llama's: a BPE with bytes, unknown, begin and end first, no normalization."""
    return sentencepiece_model("bpe", symbols, byte_fallback=True, normalization_rule_name="identity",
                               remove_extra_whitespaces=False, character_coverage=0.98)  # fmt: skip


def gemma_model() -> bytes:
    """As Gemma's: pad, end, begin and unknown first, texts without a space before them."""
    return sentencepiece_model(
        "bpe", ("<mask>", "<2mass>", "[@BOS@]", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁▁"),
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, pad_id=0, eos_id=1,
        bos_id=2, unk_id=3, add_dummy_prefix=False, vocab_size=440, pad_piece="<pad>", bos_piece="<bos>",
        eos_piece="<eos>",
    )  # fmt: skip


def t5_model(*symbols: str) -> bytes:
    """As T5's: unigrams with pad, end and unknown first."""
    return sentencepiece_model("unigram", symbols, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)


def unigram_model(**settings: Any) -> bytes:
    """As XLM-RoBERTa's: unigrams with unknown, begin and end first."""
    return sentencepiece_model("unigram", (), **settings)


def albert_model() -> bytes:
    """As ALBERT's: begin and end as control symbols."""
    return sentencepiece_model("unigram", (), pad_id=0, unk_id=1, bos_id=-1, eos_id=-1,
                               control_symbols="[CLS],[SEP],[MASK]")  # fmt: skip


def deberta_model() -> bytes:
    """As DeBERTa's: roles as control symbols around unknown."""
    return sentencepiece_model("unigram", (), pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]",
                               bos_piece="[CLS]", eos_piece="[SEP]", unk_piece="[UNK]")  # fmt: skip


def json_of_unigrams(model: bytes, *more: str, collapse: bool) -> str:
    """tokenizer.json of a unigram model as converters write it; ``collapse``: with runs of spaces made one."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(processor.get_piece_size())]
    vocabulary = [*pieces, *((word, 0.0) for word in more)]
    pipeline = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=processor.unk_id()))
    steps = [normalizers.NFKC(), *([normalizers.Replace(tokenizers.Regex(" {2,}"), " ")] if collapse else [])]
    pipeline.normalizer = normalizers.Sequence(steps)
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    pipeline.decoder = decoders.Metaspace()
    special = [processor.id_to_piece(n) for n in range(len(pieces)) if processor.is_control(n)]
    pipeline.add_special_tokens([*special, *more])
    return pipeline.to_str()


def json_of_llama(*, legacy: bool, begins: bool = True, more: tuple[str, ...] = ()) -> str:
    """tokenizer.json of Llama's model, in the older form or the newer one."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=llama_model())
    ids = {processor.id_to_piece(n): n for n in range(processor.get_piece_size())}
    merges = sorted((n, i, (p[:i], p[i:])) for p, n in ids.items() for i in range(1, len(p))
                    if p[:i] in ids and p[i:] in ids)  # fmt: skip
    model = models.BPE(ids, [pair for *_, pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    pipeline = tokenizers.Tokenizer(model)
    if legacy:
        pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pipeline.decoder = decoders.Sequence(steps)
    pipeline.add_special_tokens(["<unk>", "<s>", "</s>", *more])
    if begins:
        pipeline.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return pipeline.to_str()


WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "quick", "fox", "##es", "dog", "##s", "hello", "Hello",
    "world", ",", ".", "'", "s", "cafe", "café", "12", "##3", "漢", "字", "a", "b", "c", "x", "y",
    "##b", "n", "##t", "!",
]  # fmt: skip


def json_of_words(kind: str, *, lower: bool = False) -> str:
    """tokenizer.json of WordPiece as BERT's, or of whole words."""
    ids = {word: number for number, word in enumerate(WORDS)}
    if kind == "WordLevel":
        pipeline = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
        pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        pipeline = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
        pipeline.normalizer = normalizers.BertNormalizer(lowercase=lower)
        pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        pipeline.decoder = decoders.WordPiece()
        pipeline.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    pipeline.add_special_tokens(WORDS[:5])
    return pipeline.to_str()


def merged_files(text: str) -> dict[str, Any]:
    """vocab.json and merges.txt of a tokenizer.json, without its added tokens that aren't pieces."""
    model = json.loads(text)["model"]
    merges = "".join(f"{' '.join(pair) if isinstance(pair, list) else pair}\n" for pair in model["merges"])
    return {"vocab.json": model["vocab"], "merges.txt": "#version: 0.2\n" + merges}


def ranks() -> bytes:
    """A tiktoken file: the 256 bytes, then merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the", b"do", b"dog", b" dog", b"12", b"123"]
    return b"".join(base64.b64encode(each) + f" {rank}\n".encode() for rank, each in enumerate(tokens))


@dataclass(frozen=True)
class Form:
    """A folder: contents by file name, as bytes, text or JSON."""

    name: str
    files: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Make the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            is_json = not isinstance(content, (bytes, str))
            data = json.dumps(content, ensure_ascii=False) if is_json else content
            (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)


def form(name: str, base: Mapping[str, Any], config: Mapping[str, Any] | None = None, **more: Any) -> Form:
    """``base`` files with a tokenizer_config.json and ``more``: model (config.json), map, added."""
    names = {"model": "config.json", "map": "special_tokens_map.json", "added": "added_tokens.json"}
    extra = {names[key]: value for key, value in more.items()}
    settings = {} if config is None else {"tokenizer_config.json": config}
    return Form(name, {**base, **settings, **extra})


def decoder(*tokens: dict[str, Any], first: int) -> dict[str, Any]:
    """``added_tokens_decoder`` of consecutive ids."""
    return {str(first + number): {"special": True, **each} for number, each in enumerate(tokens)}


def forms() -> list[Form]:
    """The matrix."""
    return [
        *byte_level_forms(),
        *merges_forms(),
        *llama_forms(),
        *other_sentencepiece_forms(),
        *word_forms(),
        *tiktoken_forms(),
    ]


def byte_level_forms() -> list[Form]:
    gpt2 = byte_level("<|endoftext|>")
    size = len(json.loads(gpt2)["model"]["vocab"])
    plain = {"tokenizer.json": gpt2}
    end = "<|endoftext|>"
    chat = [token("<|im_start|>"), token("<|im_end|>")]
    late = byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", first=False)
    late_size = len(json.loads(late)["model"]["vocab"])
    neox = byte_level("<|endoftext|>", "<|padding|>")
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    gpt2_class = {"tokenizer_class": "GPT2Tokenizer", "eos_token": end, "bos_token": end, "unk_token": end}
    begun = json.loads(gpt2)
    begun["post_processor"] = json.loads(
        processors.TemplateProcessing(f"{end} $A", f"{end} $A {end} $B", [(end, 0)]).__getstate__()
    )
    digits = json.loads(gpt2)
    cuts = [{"type": "Digits", "individual_digits": True}, digits["pre_tokenizer"]]
    digits["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    ignoring = json.loads(gpt2)
    ignoring["model"]["ignore_merges"] = True
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": end, "bos_token": None}
    qwen_tokens = decoder(token(end), *chat, first=late_size)
    return [
        form("bpe/bare", plain),
        form("bpe/fast", plain, fast),
        form("bpe/backend", plain, {**fast, "tokenizer_class": "TokenizersBackend"}),
        form("bpe/unknown class", plain, {**fast, "tokenizer_class": "NobodysTokenizer"}),
        form("bpe/fast, decoder tokens", plain, {**fast, "added_tokens_decoder": decoder(*chat, first=size)}),
        form("bpe/fast, decoder normal tokens", plain, {
            **fast, "added_tokens_decoder": decoder(
                token("dog", special=False, normalized=True), token("<x>", special=False, lstrip=True, rstrip=True),
                token("fox", special=False, single_word=True), first=size)}),
        form("bpe/fast, further tokens", plain, {**fast, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
        form("bpe/fast, extra tokens", plain, {**fast, "extra_special_tokens": ["<|im_start|>"]}),
        form("bpe/fast, extra by name", plain, {**fast, "extra_special_tokens": {"image_token": "<image>"}}),
        form("bpe/fast, model's token", plain, {**fast, "image_token": "<image>"}),
        form("bpe/fast, typed tokens", plain, {**fast, "eos_token": typed(end, lstrip=True),
             "pad_token": typed("<p>")}),
        form("bpe/map strings", plain, {"tokenizer_class": "PreTrainedTokenizerFast"},
             map={"eos_token": end, "pad_token": "<pad>"}),
        form("bpe/map objects", plain, None, map={"eos_token": token(end, rstrip=True), "mask_token": token("<m>")}),
        form("bpe/map further", plain, fast, map={"additional_special_tokens": ["<a>", "<b>"]}),
        form("bpe/added_tokens.json", plain, fast, added={"<|im_start|>": size, "<|im_end|>": size + 1}),
        form("bpe/added_tokens.json, role", plain, {**fast, "pad_token": "<pad>"}, added={"<pad>": size,
             "<n>": size + 1}),
        form("bpe/split special", plain, {**fast, "split_special_tokens": True}),
        form("bpe/no end", plain, {**fast, "eos_token": None}),
        form("bpe/cleanup is ignored", plain, {**fast, "clean_up_tokenization_spaces": True}),
        form("bpe/flags beside a file", plain, {**fast, "add_bos_token": True, "add_eos_token": True,
             "bos_token": end}),
        form("bpe/prefix space, fast", plain, {**fast, "add_prefix_space": True}),
        form("bpe/prefix space, GPT-2", plain, {**gpt2_class, "add_prefix_space": True}),
        form("bpe/GPT-2", plain, gpt2_class, model={"model_type": "gpt2"}),
        form("bpe/GPT-2 by model", plain, None, model={"model_type": "gpt2"}),
        form("bpe/GPT-2 ignores merges", {"tokenizer.json": ignoring}, gpt2_class),
        form("bpe/digits, GPT-2", {"tokenizer.json": digits}, gpt2_class, model={"model_type": "starcoder2"}),
        form("bpe/digits, as written", {"tokenizer.json": digits},
             {**gpt2_class, "tokenizer_class": "TokenizersBackend"}),
        form("bpe/begins", {"tokenizer.json": begun}, fast),
        form("bpe/begins, GPT-2", {"tokenizer.json": begun}, gpt2_class),
        form("bpe/begins, NeoX", {"tokenizer.json": begun}, {**gpt2_class, "tokenizer_class": "GPTNeoXTokenizerFast",
             "pad_token": end}),
        form("bpe/NeoX", {"tokenizer.json": neox}, {"tokenizer_class": "GPTNeoXTokenizer"},
             model={"model_type": "gpt_neox"}),
        form("bpe/Llama 3", {"tokenizer.json": begun}, {**fast, "bos_token": end}, model={"model_type": "llama"}),
        form("bpe/Llama class over bytes", {"tokenizer.json": begun}, {"tokenizer_class": "LlamaTokenizer"},
             model={"model_type": "llama"}),
        form("bpe/Cohere", plain, {"tokenizer_class": "CohereTokenizer", "eos_token": end, "bos_token": end,
                                   "pad_token": end, "unk_token": end,
                                   "cls_token": None, "sep_token": None, "mask_token": None}),
        form("bpe/CodeGen", plain, {**gpt2_class, "tokenizer_class": "CodeGenTokenizer"}, model={"model_type": "phi"}),
        form("bpe/Falcon", plain, fast, model={"model_type": "falcon"}),
        form("bpe/Bloom", plain, {**fast, "tokenizer_class": "BloomTokenizerFast"}, model={"model_type": "bloom"}),
        form("bpe/Qwen 2", {"tokenizer.json": late}, {**qwen, "added_tokens_decoder": qwen_tokens},
             model={"model_type": "qwen2"}),
        form("bpe/Qwen 3.5", {"tokenizer.json": late}, {**qwen, "tokenizer_class": "Qwen3_5Tokenizer"}),
    ]  # fmt: skip


def merges_forms() -> list[Form]:
    """vocab.json with merges.txt."""
    end = "<|endoftext|>"
    files = merged_files(byte_level(end))
    size = len(files["vocab.json"])
    no_end = merged_files(byte_level(end, "<|im_start|>", "<|im_end|>", first=False))
    late_size = len(no_end["vocab.json"])
    opt = byte_level("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    deberta = byte_level("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
    gpt2_class = {"tokenizer_class": "GPT2Tokenizer", "eos_token": end, "bos_token": end, "unk_token": end}
    qwen = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": end, "bos_token": None}
    qwen_tokens = decoder(token(end), token("<|im_start|>"), token("<|im_end|>"), first=late_size)
    return [
        form("merges/GPT-2", files, gpt2_class),
        form("merges/GPT-2 by model", files, None, model={"model_type": "gpt2"}),
        form("merges/begins and ends", files, {**gpt2_class, "add_bos_token": True, "add_eos_token": True}),
        form("merges/OPT", merged_files(opt), {
            "errors": "replace", "unk_token": typed("</s>", normalized=True), "bos_token": typed("</s>",
                 normalized=True),
            "eos_token": typed("</s>", normalized=True), "pad_token": typed("<pad>", normalized=True),
            "add_prefix_space": False, "add_bos_token": True, "special_tokens_map_file": None,
                 "name_or_path": "patrickvonplaten/opt-30b",
            "tokenizer_class": "GPT2Tokenizer"}, model={"model_type": "opt"},
             map={"bos_token": token("</s>", normalized=True), "eos_token": token("</s>", normalized=True),
                  "unk_token": token("</s>", normalized=True), "pad_token": token("<pad>", normalized=True)}),
        form("merges/OPT, roles off", merged_files(opt), {"unk_token": None, "bos_token": None, "eos_token": None},
             model={"model_type": "opt"}),
        form("merges/Qwen 1.5", no_end, {
            **qwen, "add_prefix_space": False, "added_tokens_decoder": qwen_tokens,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "errors": "replace"},
             model={"model_type": "qwen2"}),
        form("merges/added_tokens.json", no_end, {**gpt2_class}, added={end: late_size, "<|im_end|>": late_size + 1}),
        form("merges/RoBERTa", merged_files(opt), {"tokenizer_class": "RobertaTokenizer"},
             model={"model_type": "roberta"}),
        form("merges/RoBERTa, mask", merged_files(opt), {
            "tokenizer_class": "RobertaTokenizer", "add_prefix_space": True, "mask_token": typed("<mask>",
                 lstrip=True)}),
        form("merges/BART", merged_files(opt), {"tokenizer_class": "BartTokenizer"}, model={"model_type": "bart"}),
        form("merges/DeBERTa", merged_files(deberta), {"tokenizer_class": "DebertaTokenizer"}),
        form("merges/DeBERTa, prefix space", {"tokenizer.json": deberta}, {
            "tokenizer_class": "DebertaTokenizerFast", "add_prefix_space": True, "do_lower_case": False}),
        form("merges/CodeGen", files, {"tokenizer_class": "CodeGenTokenizer"}, added={"<|pad|>": size}),
    ]  # fmt: skip


def llama_forms() -> list[Form]:
    model = {"tokenizer.model": llama_model()}
    llama = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    size = sentencepiece.SentencePieceProcessor(model_proto=llama_model()).get_piece_size()
    both = {"add_bos_token": True, "add_eos_token": False}
    code = {"tokenizer_class": "CodeLlamaTokenizer", "fill_token": None, "eot_token": None, "prefix_token": None,
            "middle_token": None, "suffix_token": None}  # fmt: skip
    chat = {"added_tokens_decoder": decoder(
        token("<unk>"), token("<s>"), token("</s>"), first=0) | decoder(
        token("<|im_start|>"), token("<|im_end|>", special=False), first=size)}  # fmt: skip
    symbols = {"tokenizer.model": llama_model("<|user|>", "[INST]")}
    gemma = {"tokenizer.model": gemma_model()}
    gemma_settings = {
        "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
        "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
    }  # fmt: skip
    return [
        form("model/bare", model),
        form("model/Llama type", model, None, model={"model_type": "llama"}),
        form("model/Llama 2", model, {
            **llama, **both, "legacy": False, "bos_token": typed("<s>", normalized=True),
            "eos_token": typed("</s>", normalized=True), "unk_token": typed("<unk>", normalized=True)},
             model={"model_type": "llama"}, map={"bos_token": token("<s>", normalized=True)}),
        form("model/Llama 1", model, {**llama, **both, "legacy": True}),
        form("model/Llama, legacy unsaid", model, {**llama, **both}),
        form("model/Llama, no BOS", model, {**llama, "add_bos_token": False}),
        form("model/Llama, flags absent", model, llama),
        form("model/Llama, ends", model, {**llama, "add_bos_token": True, "add_eos_token": True}),
        form("model/Llama, no prefix space", model, {**llama, **both, "add_prefix_space": False}),
        form("model/Llama, prefix space null", model, {**llama, **both, "add_prefix_space": None, "legacy": True}),
        form("model/Code Llama, prefix space null", model, {**code, "add_prefix_space": None}),
        form("json/Llama of transformers 4", {"tokenizer.json": json_of_llama(legacy=True)},
             {**llama, **both, "add_prefix_space": None, "legacy": True, "extra_special_tokens": {}}),
        form("bpe/Qwen, prefix space null", {"tokenizer.json": byte_level("<|endoftext|>")},
             {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": None}),
        form("model/Llama, chat", model, {**llama, **both, **chat, "eos_token": "<|im_end|>", "legacy": False}),
        form("model/Llama, added_tokens.json", model, {**llama, **both},
             added={"<|im_start|>": size, "<|im_end|>": size + 1}, map={"pad_token": "<|im_end|>"}),
        form("model/Llama, further", model, {**llama, **both, "additional_special_tokens": ["<|a|>", "<|b|>"]}),
        form("model/Llama, fast name", model, {**llama, **both, "tokenizer_class": "LlamaTokenizerFast"}),
        form("model/Llama, symbols", symbols, {**llama, **both}),
        form("model/Mistral 0.1", model, {**llama, **both, **chat, "legacy": True}, model={"model_type": "mistral"}),
        form("model/Mistral, bare", model, None, model={"model_type": "mistral"}),
        form("model/Mistral, symbols", symbols, {**llama, **both}, model={"model_type": "mistral"}),
        form("model/Phi 3", model, {**llama, **both, **chat}, model={"model_type": "phi3"}),
        form("model/Code Llama", model, code),
        form("model/Gemma", gemma, gemma_settings, model={"model_type": "gemma"}),
        form("model/Gemma, settings alone", gemma, {**gemma_settings, "additional_special_tokens": None}),
        form("model/Gemma by model", gemma, None, model={"model_type": "gemma2"}),
        form("json/Llama legacy", {"tokenizer.json": json_of_llama(legacy=True)}, {**llama, **both, "legacy": True}),
        form("json/Llama legacy unsaid", {"tokenizer.json": json_of_llama(legacy=True)}, {**llama, **both}),
        form("json/Llama new", {"tokenizer.json": json_of_llama(legacy=False)}, {**llama, **both, "legacy": False}),
        form("json/Llama, both files", {"tokenizer.json": json_of_llama(legacy=False), **model}, {**llama, **chat}),
        form("json/Llama, flags beside a file", {"tokenizer.json": json_of_llama(legacy=False)},
             {**llama, "add_bos_token": False}),
        form("json/Llama, fast class", {"tokenizer.json": json_of_llama(legacy=True)},
             {**llama, "tokenizer_class": "PreTrainedTokenizerFast", **chat}),
        form("json/Llama, no prefix space", {"tokenizer.json": json_of_llama(legacy=True)},
             {**llama, "add_prefix_space": False}),
        form("json/Mistral", {"tokenizer.json": json_of_llama(legacy=True)}, {**llama, **both},
             model={"model_type": "mistral"}),
        form("json/Llama, not begun", {"tokenizer.json": json_of_llama(legacy=True, begins=False)}, {**llama, **both}),
    ]  # fmt: skip


def other_sentencepiece_forms() -> list[Form]:
    t5 = {"spiece.model": t5_model()}
    extra = [f"<extra_id_{number}>" for number in range(100)]
    t5_settings = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 100,
                   "additional_special_tokens": extra, "tokenizer_class": "T5Tokenizer"}  # fmt: skip
    json_t5 = json_of_unigrams(t5_model(), *reversed(extra), collapse=True)
    xlmr = {"sentencepiece.bpe.model": unigram_model()}
    return [
        form("t5/bare settings", t5, {"tokenizer_class": "T5Tokenizer"}),
        form("t5/by model", t5, None, model={"model_type": "t5"}),
        form("t5/published", t5, t5_settings, model={"model_type": "t5"}),
        form("t5/mT5", t5, {**t5_settings, "extra_ids": 0, "additional_special_tokens": None},
             model={"model_type": "mt5", "decoder_start_token_id": 0}),
        form("t5/mT5, map", t5, {"tokenizer_class": "T5Tokenizer", "extra_ids": 0},
             map={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}, model={"model_type": "mt5"}),
        form("t5/few sentinels", t5, {"tokenizer_class": "T5Tokenizer", "extra_ids": 5}),
        form("t5/symbols", {"spiece.model": t5_model("<a>", "<b>")}, {"tokenizer_class": "T5Tokenizer",
             "legacy": False}),
        form("t5/json", {"tokenizer.json": json_t5}, t5_settings, model={"model_type": "t5"}),
        form("t5/json and model", {"tokenizer.json": json_t5, **t5}, {**t5_settings, "legacy": True}),
        form("t5/json, as written", {"tokenizer.json": json_t5}, {**t5_settings,
             "tokenizer_class": "PreTrainedTokenizerFast"}),
        form("t5/cleanup", {"tokenizer.json": json_t5}, {**t5_settings, "clean_up_tokenization_spaces": True}),
        form("xlmr/published", xlmr, {"tokenizer_class": "XLMRobertaTokenizer"}, model={"model_type": "xlm-roberta"}),
        form("xlmr/by model", xlmr, None, model={"model_type": "xlm-roberta"}),
        form("xlmr/prefix space null", xlmr, {"tokenizer_class": "XLMRobertaTokenizer", "add_prefix_space": None}),
        form("xlmr/mask", xlmr, {"tokenizer_class": "XLMRobertaTokenizer", "mask_token": typed("<mask>", lstrip=True)}),
        form("camembert", xlmr, {"tokenizer_class": "CamembertTokenizer"}, model={"model_type": "camembert"}),
        form("albert/published", {"spiece.model": albert_model()}, {"tokenizer_class": "AlbertTokenizer"}),
        form("albert/cased", {"spiece.model": albert_model()},
             {"tokenizer_class": "AlbertTokenizer", "do_lower_case": False, "keep_accents": True}),
        form("deberta/v2", {"spm.model": deberta_model()}, {"tokenizer_class": "DebertaV2Tokenizer"},
             added={"[MASK]": 89}),
        form("deberta/lower, punctuation", {"spm.model": deberta_model()},
             {"tokenizer_class": "DebertaV2Tokenizer", "do_lower_case": True, "split_by_punct": True,
              "added_tokens_decoder": decoder(token("[MASK]", lstrip=True), first=89)}),
        form("unigram/bare model", {"tokenizer.model": unigram_model()}),
        form("unigram/identity", {"tokenizer.model": unigram_model(normalization_rule_name="identity")}),
        form("unigram/FNet", {"tokenizer.json": json_of_unigrams(albert_model(), collapse=False)},
             {"tokenizer_class": "FNetTokenizer", "do_lower_case": False, "bos_token": "[CLS]", "eos_token": "[SEP]",
             "pad_token": "<pad>"}, model={"model_type": "fnet"}),
        form("unigram/json", {"tokenizer.json": json_of_unigrams(unigram_model(), collapse=False)},
             {"eos_token": "</s>"}),
    ]  # fmt: skip


def word_forms() -> list[Form]:
    vocabulary = {"vocab.txt": "\n".join(WORDS) + "\n"}
    piece, level = {"tokenizer.json": json_of_words("WordPiece")}, {"tokenizer.json": json_of_words("WordLevel")}
    bert = {"tokenizer_class": "BertTokenizer"}
    mpnet = {"vocab.txt": "\n".join(["<s>", "<pad>", "</s>", "<mask>", *WORDS]) + "\n"}
    return [
        form("bert/vocab.txt", vocabulary, bert),
        form("bert/vocab.txt, cased", vocabulary, {**bert, "do_lower_case": False}),
        form("bert/vocab.txt by model", vocabulary, None, model={"model_type": "bert"}),
        form("bert/vocab.txt, settings", vocabulary, {
            **bert, "tokenize_chinese_chars": False, "strip_accents": False, "clean_up_tokenization_spaces": True}),
        form("bert/json", piece, bert),
        form("bert/json, cased", piece, {**bert, "do_lower_case": False, "clean_up_tokenization_spaces": True}),
        form("bert/json, as written", piece, {"tokenizer_class": "PreTrainedTokenizerFast", "sep_token": "[SEP]"}),
        form("bert/DistilBERT", vocabulary, {"tokenizer_class": "DistilBertTokenizerFast"},
             model={"model_type": "distilbert"}),
        form("bert/ELECTRA", vocabulary, {"tokenizer_class": "ElectraTokenizer"}, model={"model_type": "electra"}),
        form("bert/ConvBERT", piece, {"tokenizer_class": "ConvBertTokenizer", "do_lower_case": True,
             "sep_token": "[SEP]", "pad_token": "[PAD]"}, model={"model_type": "convbert"}),
        form("mpnet/vocab.txt", mpnet, {"tokenizer_class": "MPNetTokenizer"}),
        form("mpnet/published", mpnet, {
            "tokenizer_class": "MPNetTokenizer", "do_lower_case": True, "tokenize_chinese_chars": True,
            "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "[UNK]",
            "mask_token": typed("<mask>", lstrip=True)}, model={"model_type": "mpnet"}),
        form("bert/added", vocabulary, {**bert, "additional_special_tokens": ["[E1]"], "mask_token": typed("[MASK]",
             lstrip=True)}),
        form("words/as written", level, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]"}),
        form("words/token in words", level, {"eos_token": "dog"}),
    ]  # fmt: skip


def tiktoken_forms() -> list[Form]:
    end = "<|end_of_text|>"
    listed = decoder(token("<|begin_of_text|>"), token(end), first=264)
    return [
        form("tiktoken/model", {"tokenizer.model": ranks()}, {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": "<|begin_of_text|>",
            "added_tokens_decoder": listed}),
        form("tiktoken/named so", {"tiktoken.model": ranks()}, {
            "eos_token": end, "added_tokens_decoder": {"266": {"special": True, **token(end)}}}),
        form("tiktoken/further", {"tiktoken.model": ranks()}, {"eos_token": end, "additional_special_tokens": [end,
             "<x>"]}),
    ]  # fmt: skip
