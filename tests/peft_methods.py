"""PEFT's methods beside linears and in the embedding, as PEFT configures them."""

from collections.abc import Mapping
from typing import Any

import peft
from peft import PeftConfig

BOTH = ["q_proj", "v_proj"]  # square, and with fewer outputs than inputs
ALL = ["k_proj", "up_proj", "down_proj"]  # 64 -> 32, 64 -> 96, 96 -> 64
TOKENS = [7, 3, 19, 0]
# By method, whose name each begins with: PEFT's class of the configuration, and its fields.
THEIRS: Mapping[str, tuple[type[PeftConfig], dict[str, Any]]] = {
    "lokr": (peft.LoKrConfig, {"r": 2, "alpha": 3, "target_modules": ALL}),
    "lokr, both": (peft.LoKrConfig, {"r": 1, "decompose_both": True, "target_modules": ALL}),
    "lokr, by factor": (peft.LoKrConfig, {
        "r": 2, "decompose_factor": 5, "rank_pattern": {"up_proj": 20},
        "alpha_pattern": {r"layers\.0\..*": 5}, "target_modules": ALL, "rank_dropout": 0.2,
        "layers_to_transform": [0]}),
    "loha": (peft.LoHaConfig, {"r": 2, "alpha": 5, "target_modules": ALL, "module_dropout": 0.1}),
    "loha, wide": (peft.LoHaConfig, {"r": 9, "alpha": 18, "target_modules": r".*\.(down|q)_proj"}),
    "vera": (peft.VeraConfig, {"r": 6, "target_modules": ALL}),
    "vera, drawn": (peft.VeraConfig, {"r": 5, "save_projection": False, "projection_prng_key": 4,
                                      "target_modules": BOTH}),
    "oft": (peft.OFTConfig, {"oft_block_size": 8, "target_modules": ALL}),
    "oft, exact": (peft.OFTConfig, {"r": 5, "oft_block_size": 0, "use_cayley_neumann": False,
                                    "block_share": True, "target_modules": ALL}),
    "oft, of many terms": (peft.OFTConfig, {"oft_block_size": 6, "num_cayley_neumann_terms": 7,
                                            "target_modules": BOTH}),
    "miss": (peft.MissConfig, {"r": 4, "target_modules": ALL}),
    "miss, with a rest": (peft.MissConfig, {"r": 10, "target_modules": ALL}),
    "miss, mini": (peft.MissConfig, {"r": 6, "init_weights": "mini", "mini_r": 8, "target_modules": BOTH}),
    "randlora": (peft.RandLoraConfig, {"r": 10, "randlora_alpha": 20, "target_modules": ALL}),
    "randlora, drawn": (peft.RandLoraConfig, {"r": 16, "save_projection": False, "target_modules": BOTH}),
    "randlora, sparse": (peft.RandLoraConfig, {"r": 16, "sparse": True, "save_projection": False,
                                               "target_modules": ALL}),
    "hra": (peft.HRAConfig, {"r": 4, "target_modules": ALL}),
    "hra, orthogonal": (peft.HRAConfig, {"r": 3, "apply_GS": True, "target_modules": BOTH}),
    "shira": (peft.ShiraConfig, {"r": 2, "random_seed": 3, "target_modules": ALL}),
    "fourierft": (peft.FourierFTConfig, {"n_frequency": 40, "n_frequency_pattern": {"up_proj": 70},
                                         "scaling": 300.0, "target_modules": ALL}),
    "vblora": (peft.VBLoRAConfig, {"r": 2, "num_vectors": 12, "vector_length": 16, "topk": 2,
                                   "init_vector_bank_bound": 0.5, "target_modules": ALL}),
    "vblora, chosen": (peft.VBLoRAConfig, {"r": 3, "num_vectors": 9, "vector_length": 8, "topk": 3,
                                           "init_vector_bank_bound": 0.5, "save_only_topk_weights": True,
                                           "target_modules": BOTH}),
    "c3a": (peft.C3AConfig, {"block_size": 16, "block_size_pattern": {"up_proj": 32}, "target_modules": ALL}),
    "road": (peft.RoadConfig, {"group_size": 8, "target_modules": ALL}),
    "road, of two": (peft.RoadConfig, {"variant": "road_2", "group_size": 32, "target_modules": ALL}),
    "road, of four": (peft.RoadConfig, {"variant": "road_4", "group_size": 16, "target_modules": BOTH}),
    "trainable_tokens": (peft.TrainableTokensConfig, {"token_indices": TOKENS}),
    "trainable_tokens, tied": (peft.TrainableTokensConfig, {"token_indices": TOKENS}),
    "lora, with tokens": (peft.LoraConfig, {"r": 2, "trainable_token_indices": TOKENS,
                                            "target_modules": BOTH}),
    "lora, with tied tokens": (peft.LoraConfig, {"r": 2, "target_modules": BOTH,
                                                 "trainable_token_indices": {"embed_tokens": TOKENS}}),
    "adalora": (peft.AdaLoraConfig, {"init_r": 5, "target_r": 2, "lora_alpha": 7, "total_step": 9,
                                     "target_modules": ALL}),
}  # fmt: skip
