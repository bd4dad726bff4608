"""The drafters: each fills a tree with tokens from the model's hidden states and the accepted tokens."""

import torch
from torch.nn import functional as F


class Drafter:
    """K heads; head k drafts the token k places after the next one from the states of accepted tokens.

    A subclass gives the states that its vocabulary matrices read: `context`, then `head_states` of every head.
    """

    weights_file = "drafter.safetensors"

    def __init__(self, config, weights, tree, model):
        self.config, self.weights, self.tree, self.model = config, weights, tree, model
        self.size, self.ids = config["hidden_size"], weights.get("draft_ids")
        self.layers = config.get("num_layers") or config.get("medusa_num_layers", 0)
        self.taps = [-1]  # the model's layers after which it reads states
        self.reads_prompt = config.get("context") == "conversation"  # else the answer alone
        self.cache = {}  # keys and values of layers over the text

    def states(self, hidden_states):
        """Returns the states that this drafter reads [n, H * taps], of all layers' [1, n, H]."""
        return torch.cat([hidden_states[layer][0] for layer in self.taps], dim=-1)

    def draft(self, tokens, states, root):
        """Returns a token for every node of the tree, after new accepted tokens [n] with states and the next, root."""
        context, parents, ranks = self.context(tokens, states, root), self.tree.parents, self.tree.ranks
        nodes = [root] * len(parents)
        for head, level in enumerate(self.tree.levels):
            above = sorted({parents[node] for node in level})
            paths = torch.tensor([[nodes[i] for i in self.tree.path(node)] for node in above], device=states.device)
            scores = self.score(head, self.head_states(head, context, paths)).expand(len(above), -1)  # [P, M]
            best = self.best(scores, paths[:, -1], 1 + max(ranks[node] for node in level))
            rows = (best if self.ids is None else self.ids[best]).tolist()
            for node in level:
                nodes[node] = rows[above.index(parents[node])][ranks[node]]
        return nodes

    def best(self, scores, before, width):
        """Returns the best rows [P, width] by scores [P, M], after the draft tokens `before` [P]."""
        if "conditional.before" not in self.weights:
            return scores.topk(width).indices
        best = scores.topk(min(max(128, width), scores.shape[-1]))  # a bias of low rank reorders the best
        bias = self.weights["conditional.before"][before, None] @ self.weights["conditional.after"][best.indices].mT
        return best.indices.gather(1, (best.values + bias[:, 0].float()).topk(width).indices)

    def context(self, tokens, states, root):
        """Returns what all heads read [1, H], after accepted tokens [n] with their states."""
        return states[-1:]

    def score(self, head, states):
        """Returns scores [P, M] of a head over its vocabulary for states [P, H]."""
        if self.config.get("vocabulary") == "shared":
            return self.model.get_output_embeddings()(states).float()
        name = head if f"matrices.{head}" in self.weights else 0
        return F.linear(states, self.weights[f"matrices.{name}"]).float()

    def linear(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name, x):
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.get("rms_norm_eps", 1e-6))

    def embed(self, tokens):
        """Returns the model's embeddings [.., H], of unit root mean square unless the drafter reads them raw."""
        embedded = self.model.get_input_embeddings()(tokens)
        return embedded if self.config.get("raw") else F.rms_norm(embedded, (self.size,))

    def blocks(self, name, x, layers):
        for layer in range(layers):
            x = x + F.silu(self.linear(f"{name}.{layer}.linear", x))
        return x

    def attention(self, name, x, cached):
        """Adds to states x [n, H] what they see of one another; cached: causal, also of all rows before them."""
        q, k, v = self.project(name, self.norm(f"{name}.hidden_norm", x), head_count(self.size))
        before, mask = 0, None  # for a prompt a mask would be of its length squared
        if cached:
            q, k, v, before = self.extend(name, q, k, v)
        if before:
            mask = torch.ones(len(x), before + len(x), dtype=torch.bool, device=x.device).tril(before)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cached and not before)
        return x + self.linear(f"{name}.self_attn.o_proj", seen.transpose(0, 1).flatten(1))

    def project(self, name, read, heads):
        """Returns queries, keys and values [heads, n, D] of rows [n, ..]."""
        each = (self.linear(f"{name}.self_attn.{part}_proj", read) for part in "qkv")
        return [part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in each]

    def mlp(self, name, x):
        """Adds a layer's MLP of states x [n, H] to them."""
        read = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = self.linear(f"{name}.mlp.gate_proj", read), self.linear(f"{name}.mlp.up_proj", read)
        return x + self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up)

    def extend(self, name, q, k, v, theta=10_000.0):
        """Rotates q and k [heads, n, D], and adds k and v to the cache; returns q, all k and v, and the rows before."""
        before = self.cache[name][0].shape[1] if name in self.cache else 0
        positions = torch.arange(before, before + q.shape[1], device=q.device)
        q, k = rotate(q, positions, theta), rotate(k, positions, theta)
        if before:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.cache[name], (k, v), strict=True))
        self.cache[name] = (k, v)
        return q, k, v, before

    def decoder_layer(self, name, x):
        """Returns a causal layer's states [n, H] for x [n, H], after the rows that it has seen before."""
        return self.mlp(name, self.attention(name, x, cached=True))


class Medusa(Drafter):
    """Heads that do not see one another's tokens (arXiv:2401.10774)."""

    weights_file = "medusa_lm_head.safetensors"

    def __init__(self, config, weights, tree, model):
        super().__init__(config, weights, tree, model)
        for head in range(config["medusa_num_heads"]):
            if f"{head}.{self.layers}.weight" in weights:
                weights[f"matrices.{head}"] = weights.pop(f"{head}.{self.layers}.weight")

    def head_states(self, head, context, paths):
        return self.blocks(str(head), context, self.layers)


class Hydra(Drafter):
    """Heads that see the tokens drafted before theirs (arXiv:2402.05109); with prefix layers Hydra++."""

    def context(self, tokens, states, root):
        x = states
        for layer in range(self.config.get("prefix_layers", 0)):
            x = self.decoder_layer(f"prefix.{layer}", x)
        return x[-1:]

    def head_states(self, head, context, paths):
        x = torch.cat([context.expand(len(paths), -1), self.embed(paths).flatten(1)], dim=-1)
        x = self.linear(f"blocks.{head}.skip", x) + F.silu(self.linear(f"blocks.{head}.mix", x))
        return self.blocks(f"blocks.{head}.stack", x, self.layers - 1)


class Amphista(Drafter):
    """Heads over two adapted states, which see one another's (arXiv:2406.13170)."""

    def context(self, tokens, states, root):
        adapted, x, embedded = [], states, self.embed(following(tokens, root))
        for stage in range(2):
            x = self.linear(f"stages.{stage}.fc", torch.cat([x, embedded], dim=-1))
            x = self.decoder_layer(f"stages.{stage}.layer", x)
            adapted.append(x[-1:])
        heads = self.config["num_heads"]
        x = torch.cat([self.blocks(f"blocks.{k}", adapted[k >= heads // 2], self.layers) for k in range(heads)])
        x = x + self.weights["position"]
        for layer in range(self.config.get("attention_layers", 1)):
            x = self.attention(f"attention.{layer}", x, cached=False)
        return x  # [K, H]

    def head_states(self, head, context, paths):
        return context[head : head + 1]


class Eagle(Drafter):
    """One layer over fused states of some layers, fed its own states from level to level (arXiv:2503.01840)."""

    weights_file = "model.safetensors"

    def __init__(self, config, weights, tree, model):
        super().__init__(config, weights | {"matrices.0": weights["lm_head.weight"]}, tree, model)
        self.taps, self.reads_prompt = config["taps"], True

    def context(self, tokens, states, root):
        x = self.linear("fc", states)
        q, k, v, before = self.extend("layer", *self.read(x, following(tokens, root)), self.config["rope_theta"])
        self.length = before + len(x)
        self.rows, self.own = {(root,): 0}, (k, v, torch.ones(1, self.length, dtype=torch.bool, device=x.device))
        self.level = self.leave(x[-1:], F.scaled_dot_product_attention(q[:, -1:], k, v))
        return self.level

    def head_states(self, head, context, paths):
        if head:
            above = torch.tensor([self.rows[tuple(path[:-1])] for path in paths.tolist()], device=paths.device)
            states, (keys, values, seen), theta = self.level[above], self.own, self.config["rope_theta"]
            q, k, v = self.read(states, paths[:, -1])
            positions = torch.full_like(above, self.length + head - 1)
            keys, values = torch.cat([keys, rotate(k, positions, theta)], dim=1), torch.cat([values, v], dim=1)
            # A node sees all accepted rows, its ancestors and itself.
            seen = torch.cat([seen[above], torch.eye(len(above), dtype=torch.bool, device=seen.device)], dim=1)
            q = rotate(q, positions, theta)
            self.level = self.leave(states, F.scaled_dot_product_attention(q, keys, values, attn_mask=seen))
            self.rows, self.own = {tuple(path): row for row, path in enumerate(paths.tolist())}, (keys, values, seen)
        return self.norm("norm", self.level)

    def read(self, states, tokens):
        """Returns queries, keys and values [heads, n, D] of states [n, H] and the tokens that follow them."""
        embedded = self.norm("midlayer.input_layernorm", self.model.get_input_embeddings()(tokens))
        read = torch.cat([embedded, self.norm("midlayer.hidden_norm", states)], dim=-1)
        return self.project("midlayer", read, self.config["num_attention_heads"])

    def leave(self, states, seen):
        """Returns the layer's states [n, H], from those that it read and what attention saw [heads, n, D]."""
        return self.mlp("midlayer", states + self.linear("midlayer.self_attn.o_proj", seen.transpose(0, 1).flatten(1)))


def following(tokens, root):
    """Returns the token after each of the accepted tokens [n], the root last."""
    return torch.cat([tokens[1:], tokens.new_tensor([root])])


def head_count(size):
    """Returns the number of attention heads that a drafter's own layers of this width have."""
    return next((n for n in range(max(1, size // 64), 1, -1) if size % (2 * n) == 0), 1)


def rotate(x, positions, theta):
    """Returns x [heads, n, D] with rotary positions [n]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(0, 2 * half, 2, device=x.device).float() / (2 * half))
    angles = positions.float()[:, None] * rates
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


KINDS = {"medusa": Medusa, "hydra": Hydra, "amphista": Amphista, "eagle": Eagle}
