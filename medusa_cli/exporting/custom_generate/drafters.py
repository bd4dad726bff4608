"""The drafters: each fills a tree of tokens from the model's hidden states and what it has just chosen."""

from abc import ABC, abstractmethod

import torch
from torch.nn import functional as F


class Drafter(ABC):
    """K heads; head k guesses the token k places after the next one, from states [n, H * taps] of settled tokens."""

    weights_file = "drafter.safetensors"

    def __init__(self, config, weights, tree, model):
        self.config, self.weights, self.tree = config, weights, tree
        self.embedding = model.get_input_embeddings()
        if config.get("vocabulary") == "shared":
            self.lm_head = model.get_output_embeddings().weight.to(model.device)  # where all the drafter's are
        self.size, self.heads = config["hidden_size"], config.get("num_heads") or config["medusa_num_heads"]
        self.layers = config.get("num_layers") or config["medusa_num_layers"]
        self.taps, self.ids = config.get("taps") or [], weights.get("draft_ids")
        self.dtype = next(weight.dtype for weight in weights.values() if weight.is_floating_point())
        self.reset()

    def reset(self):
        """Forget the text."""
        self.past = {}

    def states(self, hidden_states):
        """Of the states of all layers [1, n, H] those this drafter reads, the final ones last [n, H * taps]."""
        return torch.cat([hidden_states[layer][0] for layer in (*self.taps, -1)], dim=-1).to(self.dtype)

    def draft(self, tokens, states, root):
        """A token for every node of the tree, after settled tokens [n] with their states and the chosen `root`."""
        context = self.context(tokens, states, root)
        drafted = [root] * len(self.tree.parents)
        for head, level in enumerate(self.tree.levels):
            parents = sorted({self.tree.parents[node] for node in level})
            paths = torch.tensor([[drafted[i] for i in self.tree.paths[one]] for one in parents], device=states.device)
            scores = self.score(head, self.guess(head, context, paths)).float()  # [parents, M], or [1, M] for all
            best = self.best(scores, paths[:, -1], 1 + max(self.tree.ranks[node] for node in level))
            if self.ids is not None:
                best = self.ids[best]
            rows = best.tolist()
            for node in level:
                row = rows[parents.index(self.tree.parents[node]) if len(rows) > 1 else 0]
                drafted[node] = row[self.tree.ranks[node]]
        return drafted

    def best(self, scores, before, width):
        """The places of the best guesses by scores [1, M] or [P, M], after each of the drafted tokens `before` [P]."""
        if "conditional.before" not in self.weights:
            return scores.topk(width).indices
        # The token before lifts or lowers a head's best guesses by a bias of low rank.
        found = scores.topk(min(max(128, width), scores.shape[-1]))
        told, after = self.weights["conditional.before"][before], self.weights["conditional.after"][found.indices]
        again = found.values + (told[:, None] @ after.transpose(1, 2))[:, 0].float()
        return found.indices.expand(len(before), -1).gather(1, again.topk(width).indices)

    def opening(self, tokens, states):
        """What drafts begin with of a prompt: where they do not see all of it, the state that says the answer's first
        token."""
        whole = self.config.get("context") == "conversation"
        return (tokens, states) if whole else (tokens[-1:], states[-1:])

    def context(self, tokens, states, root):
        """What all heads read, [1, H], after tokens [n] with their states that were not told of yet."""
        return states[-1:]

    @abstractmethod
    def guess(self, head, context, paths):
        """The states that a head's vocabulary matrix reads, one for each path of tokens [P, depth] or one for all."""

    def score(self, head, states):
        """Scores of a head over its vocabulary."""
        matrix, factor = self.matrices(head)
        return F.linear((states if factor is None else F.linear(states, factor)).to(matrix.dtype), matrix)

    def matrices(self, head):
        """A head's vocabulary matrix, its own or that of all, and the inner factor of one of low rank."""
        if self.config.get("vocabulary") == "shared":
            return self.lm_head, None
        name = str(head if f"matrices.{head}" in self.weights else 0)
        return self.weights[f"matrices.{name}"], self.weights.get(f"factors.{name}")

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name, x):
        eps = self.config.get("rms_norm_eps", 1e-6)
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], eps)

    def embed(self, tokens):
        """The model's embeddings [.., H], brought to the size that states have unless the drafter wants them raw."""
        found = self.embedding(tokens).to(self.dtype)
        return found if self.config.get("raw") else F.rms_norm(found, (self.size,))

    def stack(self, name, x, layers):
        """Residual blocks."""
        for layer in range(layers):
            x = x + F.silu(self.linear(f"{name}.{layer}.linear", x))
        return x

    def attend(self, name, x, heads):
        """Queries, keys and values [heads, n, D] of a layer for x [n, H]."""
        return self.linear(f"{name}.qkv", x).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)

    def decoder_layer(self, name, x):
        """A causal layer over x [n, H], after the rows that it has seen before."""
        heads = head_count(self.size)
        q, k, v = self.attend(name, self.norm(f"{name}.attention_norm", x), heads)
        before = self.past[name][0].shape[1] if name in self.past else 0
        places = torch.arange(before, before + len(x), device=x.device)
        q, k = rotate(q, places), rotate(k, places)
        if before:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.past[name], (k, v), strict=True))
        self.past[name] = (k, v)
        if before:
            mask = torch.ones(len(x), before + len(x), dtype=torch.bool, device=x.device).tril(before)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:  # a prompt, for which a mask would be of its length squared
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear(f"{name}.out", seen.transpose(0, 1).flatten(1))
        gate, up = self.linear(f"{name}.gate_up", self.norm(f"{name}.mlp_norm", x)).chunk(2, dim=-1)
        return x + self.linear(f"{name}.down", F.silu(gate) * up)


class Medusa(Drafter):
    """Heads that do not see one another's guesses (arXiv:2401.10774)."""

    weights_file = "medusa_lm_head.safetensors"

    def guess(self, head, context, paths):
        return self.stack(str(head), context, self.layers)

    def matrices(self, head):
        if self.config.get("vocabulary") == "shared":
            return self.lm_head, None
        name = f"{head if f'{head}.{self.layers}.weight' in self.weights else 0}.{self.layers}"
        return self.weights[f"{name}.weight"], self.weights.get(f"{name}.factor")


class Hydra(Drafter):
    """Heads that see the tokens guessed before theirs (arXiv:2402.05109); with prefix layers Hydra++."""

    def context(self, tokens, states, root):
        if self.taps:
            *lower, final = states.split(self.size, dim=-1)
            level = [F.rms_norm(one.float(), (self.size,)).to(one.dtype) for one in lower]
            states = final + self.linear("fuse.linear", torch.cat(level, dim=-1))
        for layer in range(self.config.get("prefix_layers", 0)):
            states = self.decoder_layer(f"prefix.{layer}", states)
        return states[-1:]

    def guess(self, head, context, paths):
        x = torch.cat([context.expand(len(paths), -1), self.embed(paths).flatten(1)], dim=-1)
        x = self.linear(f"blocks.{head}.skip", x) + F.silu(self.linear(f"blocks.{head}.mix", x))
        return self.stack(f"blocks.{head}.stack", x, self.layers - 1)


class Amphista(Drafter):
    """Heads over two adapted states, which see one another's (arXiv:2406.13170)."""

    def context(self, tokens, states, root):
        following = torch.cat([tokens[1:], tokens.new_tensor([root])])
        adapted, x, embedded = [], states, self.embed(following)
        for stage in range(2):
            x = self.linear(f"stages.{stage}.fc", torch.cat([x, embedded], dim=-1))
            x = self.decoder_layer(f"stages.{stage}.layer", x)
            adapted.append(x[-1:])
        half = self.heads // 2
        each = [self.stack(f"blocks.{head}", adapted[head >= half], self.layers) for head in range(self.heads)]
        x = torch.cat(each) + self.weights["position"]
        for layer in range(self.config.get("attention_layers", 1)):
            name = f"attention.{layer}"
            q, k, v = self.attend(name, self.norm(f"{name}.norm", x), head_count(self.size))
            seen = F.scaled_dot_product_attention(q, k, v)
            x = x + self.linear(f"{name}.out", seen.transpose(0, 1).flatten(1))
        return x  # [K, H]

    def guess(self, head, context, paths):
        return context[head : head + 1]


class Eagle(Drafter):
    """One layer over fused states of some layers, fed its own states from level to level (arXiv:2503.01840)."""

    weights_file = "model.safetensors"

    def __init__(self, config, weights, tree, model):
        super().__init__(config, weights, tree, model)
        if "d2t" in weights:
            self.ids = weights["d2t"] + torch.arange(len(weights["d2t"]), device=weights["d2t"].device)

    def states(self, hidden_states):
        return torch.cat([hidden_states[layer][0] for layer in self.taps], dim=-1).to(self.dtype)

    def opening(self, tokens, states):
        return tokens, states

    def context(self, tokens, states, root):
        x = self.linear("fc", states)
        self.length = self.past["keys"].shape[1] if self.past else 0
        places = torch.arange(self.length, self.length + len(x), device=x.device)
        q, k, v = self.heads_of(x, torch.cat([tokens[1:], tokens.new_tensor([root])]), places)
        if self.past:
            k, v = torch.cat([self.past["keys"], k], dim=1), torch.cat([self.past["values"], v], dim=1)
        self.past = {"keys": k, "values": v}
        self.length += len(x)
        self.branch, self.own = {(root,): 0}, (k, v, torch.ones(1, self.length, dtype=torch.bool, device=x.device))
        self.level = self.leave(x[-1:], F.scaled_dot_product_attention(q[:, -1:], k, v))
        return self.level

    def guess(self, head, context, paths):
        if head:
            above = torch.tensor([self.branch[tuple(path[:-1])] for path in paths.tolist()], device=paths.device)
            states, (keys, values, seen) = self.level[above], self.own
            q, k, v = self.heads_of(states, paths[:, -1], torch.full_like(above, self.length + head - 1))
            keys, values = torch.cat([keys, k], dim=1), torch.cat([values, v], dim=1)
            # Each sees what is settled, its ancestors and itself.
            seen = torch.cat([seen[above], torch.eye(len(above), dtype=torch.bool, device=seen.device)], dim=1)
            self.level = self.leave(states, F.scaled_dot_product_attention(q, keys, values, attn_mask=seen))
            self.branch = {tuple(path): row for row, path in enumerate(paths.tolist())}
            self.own = (keys, values, seen)
        return self.norm("norm", self.level)

    def matrices(self, head):
        return self.weights["lm_head.weight"], None

    def heads_of(self, states, tokens, places):
        """Queries, keys and values [heads, n, D] of states [n, H] beside the tokens that follow them."""
        embedded = self.norm("midlayer.input_layernorm", self.embedding(tokens).to(states.dtype))
        x = torch.cat([embedded, self.norm("midlayer.hidden_norm", states)], dim=-1)
        heads, theta = self.config["num_attention_heads"], self.config["rope_theta"]
        each = [self.linear(f"midlayer.self_attn.{name}_proj", x).unflatten(-1, (heads, -1)) for name in "qkv"]
        q, k, v = (one.transpose(0, 1) for one in each)
        return rotate(q, places, theta), rotate(k, places, theta), v

    def leave(self, states, seen):
        """The layer's states, from those that it read and what attention saw [heads, n, D]."""
        states = states + self.linear("midlayer.self_attn.o_proj", seen.transpose(0, 1).flatten(1))
        x = self.norm("midlayer.post_attention_layernorm", states)
        gate, up = self.linear("midlayer.mlp.gate_proj", x), self.linear("midlayer.mlp.up_proj", x)
        return states + self.linear("midlayer.mlp.down_proj", F.silu(gate) * up)


def head_count(size):
    """The most attention heads of at least 64 that share a width evenly, with an even width to rotate."""
    return next((n for n in range(max(1, size // 64), 1, -1) if size % (2 * n) == 0), 1)


def rotate(x, positions, theta=10_000.0):
    """Rotary positions [n] on x [heads, n, D]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(0, 2 * half, 2, device=x.device).float() / (2 * half))
    angles = positions.float()[:, None] * rates
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


KINDS = {"medusa": Medusa, "hydra": Hydra, "amphista": Amphista, "eagle": Eagle}
