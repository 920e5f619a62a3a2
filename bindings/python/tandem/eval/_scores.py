# SPDX-License-Identifier: MIT
"""Distances of predictions from the text and from dense attention's predictions. Sums are in double precision."""
import math
from typing import Any

import torch


class Scores:
    """Sums over predictions. They are added in blocks, so that a whole context's logits are never kept."""

    def __init__(self) -> None:
        self.n = self.n_agree = 0
        self.nll = self.divergence = self.max_logit_difference = 0.0

    def add(self, logits: torch.Tensor, dense: torch.Tensor, targets: torch.Tensor) -> None:
        """Adds logits [n, vocabulary], dense attention's for the same tokens, and the tokens that follow, [n]."""
        for mine, theirs, target in zip(logits.split(64), dense.split(64), targets.to(logits.device).split(64), strict=True):
            log_p = torch.log_softmax(mine.double(), -1)
            log_q = torch.log_softmax(theirs.double(), -1)
            self.nll -= float(log_p.gather(1, target[:, None]).sum())
            self.divergence += float((log_q.exp() * (log_q - log_p)).sum())
            self.n_agree += int((mine.argmax(-1) == theirs.argmax(-1)).sum())
            self.max_logit_difference = max(self.max_logit_difference, float((mine - theirs).abs().max()))
            self.n += len(target)

    def figures(self) -> dict[str, Any]:
        """Returns means. The divergence is KL(dense || setting) in nats; a rounding error below 0 counts as 0."""
        nll = self.nll / self.n
        return {"n_predictions": self.n, "nll": nll, "perplexity": math.exp(nll), "bits_per_token": nll / math.log(2),
                "kl_divergence": max(self.divergence / self.n, 0.0), "top1_agreement": self.n_agree / self.n,
                "max_logit_difference": self.max_logit_difference}
