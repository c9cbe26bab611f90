"""The config.json of published models: what says how many parameters they have."""

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA2_7B = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32000, "intermediate_size": 11008, "hidden_act": "silu", "tie_word_embeddings": False},
}
MISTRAL_7B = {**LLAMA2_7B, "model_type": "mistral", "num_key_value_heads": 8, "intermediate_size": 14336}
