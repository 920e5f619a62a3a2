# SPDX-License-Identifier: MIT
"""A search for head patterns: the pattern, and its sizes, for each query head of a model under the policy "patterns".

``python -m tandem.patterns search MODEL --text FILE --contexts 8192 --budget 0.33 --out FILE.json`` runs a causal language
model of Hugging Face Transformers on passages of a text, and on passages with planted facts and questions for them. For each
query head it measures two things of every candidate pattern: its cost in (query, key) pairs, and the share of the head's
attention weights that it leaves out. MInference (arXiv 2407.02490) does this head by head at equal cost. Then each head gets
one candidate, so that the pairs of all heads stay within the budget and the loss is least. docs/patterns.md of the project
explains the figures.

Order of a run: prompts are made (_prompts). Each prompt runs densely, and the queries and keys of every layer are measured as
they pass (_capture). The library's rules give the keys that a candidate names (_rules); weights on other keys are its loss
(_recall). Heads get their candidates (_choice). The file and a table are written (_report).
"""
