"""Which class of tokenizers a folder's files name: it decides how text is cut, also beside a tokenizer.json.

The rules and names are those of transformers 5, the reference for what a published folder means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import DataError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


AS_WRITTEN = "TokenizersBackend"
"""The class that takes a tokenizer.json as it is."""

# Classes that build their pipeline from the vocabulary and the settings, whatever a tokenizer.json says.
BUILT = (
    "AlbertTokenizer",
    "BertTokenizer",
    "CamembertTokenizer",
    "CodeGenTokenizer",
    "CodeLlamaTokenizer",
    "CohereTokenizer",
    "DebertaV2Tokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
    "RobertaTokenizer",
    "T5Tokenizer",
    "XLMRobertaTokenizer",
)
_OTHER_NAMES = {
    "BertTokenizer": "DistilBert Electra LayoutLM Lxmert MobileBert SqueezeBert",
    "RobertaTokenizer": "Bart LED Longformer Mvp",
    "LlamaTokenizer": "Phi3",
}
_CLASS_OF_NAME = {f"{name}Tokenizer": built for built, names in _OTHER_NAMES.items() for name in _words(names)} | {
    name: name for name in BUILT
}
# Classes with rules of their own, which aren't reproduced here.
_OTHERS = frozenset(
    f"{name}Tokenizer"
    for name in _words(
        "Barthez Bartpho BertGeneration BertJapanese Bertweet BigBird BioGpt BlenderbotSmall Blenderbot ByT5 CLIP CTRL "
        "Canine Clvp ConvBert CpmAnt Cpm DPRContextEncoder DPRQuestionEncoder DPRReader Deberta Dia Esm Esmc FNet FSMT "
        "FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke "
        "M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM Mgpstr MyT5 Nllb Nougat OpenAIGPT PLBart Parakeet Pegasus "
        "Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert RoCBert RoFormer SeamlessM4T Siglip2 Siglip "
        "Speech2Text SpeechT5 Splinter Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM "
        "XLM XLNet"
    )
)
# The class of a model's type in config.json; the types of AS_WRITTEN ignore what tokenizer_config.json names.
_CLASS_OF_TYPE = {
    "AlbertTokenizer": "albert yoso",
    "BertTokenizer": "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava git "
    "grounding-dino layoutlm lxmert "
    "megatron-bert mm-grounding-dino mobilebert nezha nomic_bert qdqbert realm retribert squeezebert "
    "tvp vilt visual_bert",
    "CamembertTokenizer": "camembert",
    "CodeLlamaTokenizer": "code_llama",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "DebertaV2Tokenizer": "deberta-v2",
    "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo "
    "jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma "
    "shieldgemma2 t5gemma zaya",
    "LlamaTokenizer": "idefics idefics2",
    "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
    "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
    "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "RobertaTokenizer": "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mega mra mvp roberta "
    "roberta-prelayernorm",
    "T5Tokenizer": "mt5 musicgen musicgen_melody switch_transformers t5",
    "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    AS_WRITTEN: "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 "
    "ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode "
    "gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm "
    "internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 "
    "minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 "
    "mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 "
    "olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts "
    "smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl",
    "a class of its own": "aimv2 barthez bartpho bert-generation bert-japanese bertweet big_bird biogpt blenderbot "
    "blenderbot-small byt5 canine clip clipseg clvp cpm cpmant ctrl data2vec-audio deberta dia dpr esm esmc esmfold2 "
    "flaubert fnet fsmt funnel gpt-sw3 gpt_neox_japanese granite_speech5_ctc groupvit herbert hubert lasr_ctc "
    "lasr_encoder layoutlmv2 layoutlmv3 layoutxlm luke m2m_100 marian markuplm mbart mbart50 mgp-str mluke mpnet myt5 "
    "nemotron3_5_asr nemotron_asr_streaming nllb nllb-moe nougat omdet-turbo oneformer openai-gpt owlv2 owlvit "
    "parakeet_ctc parakeet_rnnt parakeet_tdt pegasus perceiver phobert plbart pp_formulanet prophetnet rag reformer "
    "rembert roc_bert roformer sam3 sam3_video seamless_m4t seamless_m4t_v2 siglip siglip2 speech_to_text speecht5 "
    "splinter tapas tipsv2 udop unispeech unispeech-sat videoprism vits wav2vec2 wav2vec2-bert wav2vec2-conformer "
    "wav2vec2_phoneme whisper xclip xglm xlm xlnet",
}
_OF_TYPE = {model_type: built for built, types in _CLASS_OF_TYPE.items() for model_type in _words(types)}
_MISTRAL = _words("ministral ministral3 mistral mistral3 mistral_large4 mixtral pixtral voxtral voxtral_realtime")
# Types whose published tokenizer_config.json names a class that doesn't fit: the class of the type counts.
_WRONGLY_NAMED = _words(
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax hyperclovax_vision_v2 "
    "hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3 minicpmv minimax_m2 modernbert "
    "modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl phi3 phi3_v phimoe qwen2 qwen3_5 "
    "qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm step3_vl vipllava"
)


def class_of(settings: Mapping[str, Any], model: Mapping[str, Any], *, is_byte_level: bool, where: str) -> str:
    """AS_WRITTEN or one of BUILT. ``settings``: tokenizer_config.json; ``model``: config.json.

    ``is_byte_level``: whether there is a tokenizer.json of byte-level BPE. Raises DataError for any other class.
    """
    own, model_type = _text(settings, "tokenizer_class"), _text(model, "model_type") or ""
    named = own or _text(model, "tokenizer_class")
    registered = _OF_TYPE.get(model_type)
    is_code = _has_code(settings) and model_type not in _WRONGLY_NAMED
    plain = named.removesuffix("Fast") if named else None
    if plain is not None and not is_code:
        is_fitting = model_type not in _MISTRAL and model_type not in _WRONGLY_NAMED
        if plain == "LlamaTokenizer" and is_fitting and is_byte_level:
            return AS_WRITTEN
        if registered is not None and registered != plain:
            if registered == AS_WRITTEN:
                return AS_WRITTEN
            return _supported(registered if model_type in _WRONGLY_NAMED else plain, where)
    if own is not None or (plain is not None and registered is None):
        return _supported(plain or "", where)
    return _supported(registered or AS_WRITTEN, where)


def needs_code(settings: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether the folder's tokenizer is a program in the folder, which is never run."""
    model_type, named = _text(model, "model_type") or "", _text(settings, "tokenizer_class") or ""
    is_known = model_type in _OF_TYPE or named.removesuffix("Fast") in {*_CLASS_OF_NAME, *_OTHERS, AS_WRITTEN}
    return _has_code(settings) and model_type not in _WRONGLY_NAMED and not is_known


def _has_code(settings: Mapping[str, Any]) -> bool:
    found = settings.get("auto_map")
    return isinstance(found, list) or (isinstance(found, dict) and found.get("AutoTokenizer") is not None)


def _supported(name: str, where: str) -> str:
    """The class that a name means; names that nobody knows mean AS_WRITTEN."""
    if name in _OTHERS or " " in name:
        raise DataError(
            f"{where} is of {name}, which cuts text by rules of its own and isn't supported: to use the tokenizer.json "
            f'beside it as it is, write "tokenizer_class": "{AS_WRITTEN}" in tokenizer_config.json.'
        )
    return _CLASS_OF_NAME.get(name, AS_WRITTEN)


def _text(found: Mapping[str, Any], key: str) -> str | None:
    value = found.get(key)
    return value if isinstance(value, str) and value else None
