# SPDX-License-Identifier: MIT
"""A search for head patterns: which pattern, of which size, each query head of a model gets under the policy "patterns".

``python -m tandem.patterns search MODEL --text FILE --contexts 8192 --budget 0.33 --out FILE.json`` runs a causal language model of
Hugging Face Transformers on passages of a text, and on passages with planted facts and questions for them. For each query head it
measures what every candidate pattern costs, in pairs of a query and a key, and which share of the head's attention weights it leaves
out (MInference, arXiv 2407.02490, does this head by head at equal cost). Then it gives each head one candidate, so that the pairs of
all heads stay within the budget and what is lost is least. docs/patterns.md of the project explains the figures.

Order of a run: prompts are made (_prompts); each prompt runs densely, and the queries and keys of every layer are measured as they pass
(_capture); the rules of the library say which keys a candidate names (_rules); weights on other keys are what it loses (_recall);
heads get their candidates (_choice); the file and a table are written (_report).
"""
