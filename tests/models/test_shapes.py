"""Named shapes against their authors' figures."""

from __future__ import annotations

import pytest

from jaxrl.models.config import ModelConfig
from jaxrl.models.shapes import SHAPES, named_shape

# Parameters as the models' safetensors files on the Hub count them.
PARAMS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Llama-3.1-8B": 8_030_261_248,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Mistral-7B": 7_241_732_096,
    "Ministral-8B": 8_019_808_256,
    "SmolLM3-3B": 3_075_098_624,
    "OLMo-2-1B": 1_484_916_736,
    "OLMo-2-7B": 7_298_617_344,
    "OLMo-3-7B": 7_298_011_136,
    "Phi-4": 14_659_507_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "OLMoE-1B-7B": 6_919_161_856,
    "Mixtral-8x7B": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Granite-3.1-1B-A400M": 1_334_628_352,
    "Granite-3.1-3B-A800M": 3_298_793_472,
    "Granite-3.1-2B": 2_533_525_504,
}


@pytest.mark.parametrize("name", PARAMS)
def test_number_of_parameters_is_the_published_one(name):
    assert named_shape(name).num_params() == PARAMS[name]


def test_a_shape_has_a_config_json():
    """Every shape survives the way to a config.json and back, so that transformers can build the same."""
    for name in SHAPES:
        assert ModelConfig.from_hf(named_shape(name).to_hf()) == named_shape(name)


def test_unknown_shape_names_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"Qwen2\.5-1\.5B.*did you mean Qwen2\.5-7B\?"):
        named_shape("Qwen2.5-7b")
