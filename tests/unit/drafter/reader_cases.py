"""Heads of tests in the words of public checkpoints."""


def flat_config(head, **more):
    """The same head in the words of SafeAILab, SpecForge and Model-Optimizer."""
    config = head.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": 2048,
        **more,
    }
