# SPDX-License-Identifier: MIT
"""Quality of Tandem's policies, storage types and key rotation on a causal language model of Hugging Face Transformers.

``python -m tandem.eval MODEL --text FILE --out DIR`` compares each setting with dense attention (Transformers' "eager", f32) in
the same run: perplexity by decode, divergence, keys kept, attention mass left out, retrieval, memory and speed. It writes
``results.jsonl`` (one measurement a line), ``table.md`` and pictures. docs/quality.md of the project explains the figures.

Order of a run: the library checks the settings before the model is loaded (_settings). The model is loaded once and used with
both attention implementations (_language_model). Each task measures (_perplexity, _mass, _retrieval, _speed), and each finished
measurement is one line of the results (_results). Tables and pictures use only these lines (_tables, _pictures).
"""
