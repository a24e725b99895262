"""KDA variants, one file each: a config with its own `build`, and a layer that overrides one step.

Nothing is registered. `replace(model, kda=MyConfig(**vars(model.kda), my_field=...))` uses one, and
`k3jax.testing.check_kda_contract(cfg)` says whether it keeps what decoding and packing rely on.
"""
