"""Remembers which prompts were sent to which endpoints: the work of an approximate prefix producer.

This code is not in the plugin's class, because mypyc makes no native class of a plugin, and these methods run for each request.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Final

from compiled.calls import by_row
from epp.candidates import Candidates, Snapshot
from epp.data import CACHE_TOKENS, Datum
from epp.decision.decision import Decision, ProfileRun, Response
from epp.endpoints.server_blocks import server_blocks
from epp.plugin import Hashes, Measure, Prefills, PrefixIndex
from epp.prefix.blocks import block_hashes, landmarks, root, seed, with_media
from epp.prefix.match import Capacity, Prefill, PrefixMatch, joined
from epp.request import BYTES_PER_TOKEN, Request
from epp.request.tokens import TOKENS, PromptTokens

ROOTS_MAX: Final = 4096
SALT_CHARS_MAX: Final = 256  # characters of a cache salt; the root hashes of longer salts are not kept
PROMPTS_MAX: Final = 64  # prompts of one request that are matched
REFRESH_S: Final = 1.0  # for this long after a worker has added blocks to the index, it does not add the same blocks again
REFRESHED_MAX: Final = 4096  # a worker remembers for this many chains when it added them again
KEPT_S: Final = 5.0  # a worker adds the blocks of a request in progress again after this time
KEPT_AT_ONCE: Final = 4  # chains that are added again at a time
KEPT_MAX: Final = 4096  # a worker adds the chains again of at most so many requests in progress
RECENT_MAX: Final = 256
LONG_BLOCKS: Final = 512  # a long chain pushes out one of the remembered chains for each so many of its blocks
COMPARED_MAX: Final = 256  # remembered chains with which the chains of one failed request are compared
# One worker may add blocks of requests without a first token for at most 1 / UNPROVEN_SHARE of an endpoint's capacity, so that requests
# that the server refuses displace no other blocks: the index has room for a twentieth more than the capacity. The worker may always add
# UNPROVEN_BLOCKS blocks.
UNPROVEN_SHARE: Final = 32
UNPROVEN_BLOCKS: Final = 16

Chain = tuple[Hashes, Mapping[int, int]]  # hashes of one of several prompts; owner -> leading blocks that the owner holds


class Sent:
    """Remembers a chain that was sent to an endpoint. `owner`: the endpoint's owner id; 0 if the request failed.

    `known`: how many leading blocks the endpoint held before, or computes for other requests. `sure`: how many leading blocks it held by
    the index. `first`: the first block that the index learns: 0 if it learns the known blocks again. `taught`: how many leading blocks of
    the chain the index has. `later`: whether the index learns the chain at the first token. `unproven`: how many blocks count as taught
    without a first token. `prefill`: what `Prefills.begins` returned; -1 if the prefill is not shown. `at`: when the index learned the
    chain last, in monotonic seconds.
    """

    __slots__ = ("at", "first", "hashes", "known", "later", "owner", "prefill", "sure", "taught", "unproven")

    def __init__(self, owner: int, hashes: Hashes, known: int, sure: int, first: int, at: float) -> None:
        self.owner = owner
        self.at = at
        self.hashes = hashes
        self.known = self.taught = known
        self.sure = sure
        self.first = first
        self.later = False
        self.unproven = 0
        self.prefill = -1


class InProgress:
    """Lets the index learn the blocks of requests in progress again, so that it keeps them as their servers do.

    A server drops no block that a request uses. Of the others, it first drops those that have been unused for the longest time, counted
    from the end of the last answer that used them. The index first drops the blocks that it learned the longest time ago.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._chains: dict[Sent, None] = {}  # by `at`
        self._due = 0.0  # no chain is due before

    def add(self, sent: Sent) -> None:
        """Takes a chain that was sent."""
        if len(self._chains) < KEPT_MAX:
            self._chains[sent] = None

    def drop(self, sent: Sent) -> bool:
        """Forgets a chain. Returns whether it was kept."""
        kept = sent in self._chains
        if kept:
            del self._chains[sent]
        return kept

    def ended(self, sent: Sent, now: float) -> None:
        """Takes the end of a chain's request, which leaves its blocks at the server."""
        if self.drop(sent) and now - sent.at >= REFRESH_S:
            self._learn(sent, now)

    def look(self, now: float, listed: Container[int]) -> None:
        """Lets the index learn chains that are due. `listed`: the owner ids in use; any other id may belong to another endpoint later."""
        if now < self._due:
            return
        chains = self._chains
        for _ in range(KEPT_AT_ONCE):
            sent = next(iter(chains), None)
            self._due = KEPT_S + (now if sent is None else sent.at)
            if sent is None or now < self._due:
                return
            del chains[sent]
            if sent.owner in listed:
                self._learn(sent, now)
                chains[sent] = None

    def _learn(self, sent: Sent, now: float) -> None:
        sent.at = now
        learned = landmarks(sent.hashes[: sent.taught], 0)
        if len(learned):
            self._index.learn(learned, sent.owner)


class Keys:
    """The keys of the data that a producer keeps with each request. `match`: the result of the producer. `chains`: the chains of a request
    with several prompts. `sent`: the sent chains.

    `sure`: owner -> blocks by the index, if prefills under way add further blocks. `begun`: whether the first token has come.
    """

    def __init__(self, name: str, match: Datum[PrefixMatch]) -> None:
        self.match = match
        self.chains: Datum[list[Chain]] = Datum(f"prefix_chains/{name}", list)
        self.sent: Datum[list[Sent]] = Datum(f"prefix_sent/{name}", list)
        self.sure: Datum[Mapping[int, int]] = Datum(f"prefix_sure/{name}", dict)
        self.begun: Datum[bool] = Datum(f"prefix_begun/{name}", bool)


class SentPrompts:
    """Matches prompts with the index, adds the blocks of sent prompts to the index, and removes the blocks of failed requests."""

    def __init__(
        self,
        keys: Keys,
        block_tokens: int,
        bytes_max: int,
        capacity: Capacity,
        *,
        index: PrefixIndex,
        prefills: Prefills,
        secret: int,
        hit_ratio: Measure,
        hit_bytes: Measure,
    ) -> None:
        """`bytes_max`: the most bytes of a prompt to match. `capacity`: blocks of an endpoint in the index. `secret`: as in
        `epp.prefix.blocks`.
        """
        self._keys = keys
        self._block_tokens = block_tokens
        self._block_bytes = block_tokens * BYTES_PER_TOKEN
        self._bytes_max = bytes_max
        self._capacity = capacity
        self._index = index
        self._prefills = prefills
        self._secret = secret
        self._hit_ratio = hit_ratio
        self._hit_bytes = hit_bytes
        # (owner, last known block of a chain) -> when it was added again
        self._refreshed: dict[tuple[int, int], float] = {}
        self.recent: deque[Sent] = deque(maxlen=RECENT_MAX)
        self._in_progress = InProgress(index)
        # owner -> blocks that the index has learned of requests without a first token
        self._unproven: dict[int, int] = {}
        self._roots: dict[tuple[str, str], tuple[int, int]] = {}

    def match(self, request: Request, candidates: Candidates) -> None:
        """Emits the match of the request's prompt."""
        tokenized = request[TOKENS]
        if tokenized is not None:
            self._produce_each(request, candidates, [_words(prompt) for prompt in tokenized.prompts[:PROMPTS_MAX]])
            return
        several = request.prompt.several
        if several:
            self._produce_each(request, candidates, several[:PROMPTS_MAX])
        elif prompt := request.prompt.canonical:
            self._produce_one(request, candidates, self._hashed(prompt, request), len(prompt) // BYTES_PER_TOKEN)

    def _produce_one(self, request: Request, candidates: Candidates, hashes: Hashes, tokens: int) -> None:
        """Matches one prompt. Blocks that an endpoint computes for another request count as held."""
        depths = self._index.match(hashes)
        under_way = [Prefill(*each) for each in self._prefills.under_way(hashes, request.now)]
        if under_way:
            request[self._keys.sure], depths = depths, dict(depths)
            for prefill in under_way:
                depths[prefill.owner] = max(prefill.blocks, depths.get(prefill.owner, 0))
        request[self._keys.match] = self._matched(depths, candidates, hashes, tokens, under_way)

    def _produce_each(self, request: Request, candidates: Candidates, prompts: Sequence[bytes]) -> None:
        """Matches each prompt separately, and adds up the matched blocks."""
        given = [prompt for prompt in prompts if prompt]
        if not given:
            return
        hashed = [self._hashed(prompt, request) for prompt in given]
        if len(given) == 1:
            self._produce_one(request, candidates, hashed[0], len(given[0]) // BYTES_PER_TOKEN)
            return
        chains: list[Chain] = []
        matches: list[PrefixMatch] = []
        for prompt, hashes in zip(given, hashed, strict=True):
            depths = self._index.match(hashes)
            chains.append((hashes, depths))
            matches.append(self._matched(depths, candidates, hashes, len(prompt) // BYTES_PER_TOKEN, ()))
        request[self._keys.chains] = chains
        request[self._keys.match] = joined(matches)

    def _hashed(self, prompt: bytes, request: Request) -> Hashes:
        if len(prompt) > self._bytes_max:
            prompt = prompt[: self._bytes_max]
        start, secret = self._root(request)
        return block_hashes(prompt, self._block_bytes, start, secret)

    def _matched(
        self, depths: Mapping[int, int], candidates: Candidates, hashes: Hashes, tokens: int, under_way: Sequence[Prefill]
    ) -> PrefixMatch:
        """Returns the match of one prompt. `depths`: owner -> how many leading blocks the owner holds."""
        snapshot = candidates.snapshot
        endpoint_list = snapshot.endpoint_list
        blocks = by_row(depths, endpoint_list.row_of_owner, len(endpoint_list.endpoints)) if depths else None
        servers = server_blocks(snapshot)
        return PrefixMatch(blocks, hashes, self._block_tokens, tokens, servers=servers, under_way=under_way)

    def learn(self, request: Request, decision: Decision) -> None:
        """Adds the request's blocks to the index for its targets, or notes which blocks to add at the first token."""
        match = request[self._keys.match]
        if match is None:
            return
        primary = decision.run(decision.primary)
        assert primary is not None
        self._in_progress.look(request.now, primary.candidates.snapshot.endpoint_list.row_of_owner)
        cached = 0.0 if match.cached is None else float(match.cached.item(primary.row))
        self._hit_ratio.observe(cached / match.most() if cached else 0.0)
        self._hit_bytes.observe(cached * BYTES_PER_TOKEN)
        sent: list[Sent] = []
        request[self._keys.sent] = sent  # from here on, `ended` removes these blocks from the index, whatever fails below
        chains = request[self._keys.chains]
        sure = request[self._keys.sure]
        self._learn(match, primary, chains, sure, request.now, sent)
        prefill = decision.run(decision.prefill)
        if prefill is not None and prefill is not primary:
            self._learn(match, prefill, chains, sure, request.now, sent)
        if chains is None:
            self._show(request, match, sent)

    def _show(self, request: Request, match: PrefixMatch, sent: Sequence[Sent]) -> None:
        """Shows the prefill of a request with one prompt. A prefill endpoint, if any, is the last one in `sent`."""
        computes = sent[-1]
        tokens = max(0, match.tokens - computes.known * self._block_tokens)
        computes.prefill = self._prefills.begins(computes.hashes, computes.owner, computes.known, tokens, request.now)

    def begun(self, request: Request) -> None:
        """Takes the first token of an answer."""
        sents = request[self._keys.sent]
        if sents:
            request[self._keys.begun] = True
            self._computed(sents)

    def ended(self, request: Request, response: Response) -> None:
        """Removes the request's blocks from the index if the server failed the request or gave no token."""
        sents = request[self._keys.sent]
        if not sents:
            return
        begun = bool(request[self._keys.begun])
        if response.failed or not (begun or response.whole):
            for sent in sents:
                self._in_progress.drop(sent)
                self._prove(sent)
            self._take_back(sents)
            return
        if not begun:
            self._computed(sents)
        for sent in sents:
            self._in_progress.ended(sent, request.now)

    def _computed(self, sents: Sequence[Sent]) -> None:
        """Adds the blocks that the index does not have yet. Also adds blocks that another request had begun to prefill, so that these
        blocks stay even if that request is cancelled.
        """
        for sent in sents:
            self._prove(sent)
            if sent.later:
                sent.later, sent.taught = False, len(sent.hashes)
                self._index.learn(landmarks(sent.hashes, min(sent.first, sent.sure)), sent.owner)
            elif sent.sure < sent.known:
                self._index.learn(landmarks(sent.hashes[: sent.known], sent.sure), sent.owner)

    def _prove(self, sent: Sent) -> None:
        """Notes that a prefill has ended."""
        self._prefills.ends(sent.prefill)
        sent.prefill = -1
        if sent.unproven:
            left = self._unproven[sent.owner] - sent.unproven
            sent.unproven = 0
            if left:
                self._unproven[sent.owner] = left
            else:
                del self._unproven[sent.owner]

    def _take_back(self, sents: Sequence[Sent]) -> None:
        failed = [(sent, sent.owner) for sent in sents]
        for sent, _ in failed:
            sent.owner = 0
        similar = self._similar(failed)
        left = COMPARED_MAX  # bounded, because a request may have many prompts that begin alike
        for sent, owner in failed:
            kept = sent.known
            others = similar[owner, sent.hashes.item(0)][:left]
            left -= len(others)
            for other in others:
                if (shared := _shared(sent, other)) > sent.known:
                    kept = max(kept, shared)
                    # From here on, the other request counts as the one that added these blocks: if it fails, too, it removes them.
                    other.known = min(other.known, sent.known)
            added = landmarks(sent.hashes[: sent.taught], kept)
            if len(added):
                self._index.forget(added, owner)

    def _similar(self, failed: Sequence[tuple[Sent, int]]) -> Mapping[tuple[int, int], list[Sent]]:
        """Returns (owner, first hash) of each failed chain -> the recent chains with the same owner and first hash, the latest first."""
        chains: dict[tuple[int, int], list[Sent]] = {(owner, sent.hashes.item(0)): [] for sent, owner in failed}
        owners = {owner for _, owner in failed}
        for other in reversed(self.recent):
            if other.owner in owners and (alike := chains.get((other.owner, other.hashes.item(0)))) is not None:
                alike.append(other)
        return chains

    def _learn(
        self,
        match: PrefixMatch,
        run: ProfileRun,
        chains: Sequence[Chain] | None,
        sure: Mapping[int, int] | None,
        now: float,
        sent: list[Sent],
    ) -> None:
        """Adds a request's chains to the index for the endpoint that a profile picked, and remembers them in `sent`.

        `sure`: owner -> blocks by the index, if prefills under way add further blocks.
        """
        row, snapshot = run.row, run.candidates.snapshot
        owner = snapshot.endpoints[row].owner
        if chains is None:
            known = 0 if match.blocks is None else int(match.blocks.item(row))
            by_index = known if sure is None else sure.get(owner, 0)
            chain = Sent(owner, match.hashes, known, by_index, self._first(match.hashes, known, by_index, owner, now), now)
            self._learn_chain(chain, match.tokens // self._block_tokens, snapshot, row, sent)
        else:
            for hashes, by in chains:
                known = by.get(owner, 0)
                chain = Sent(owner, hashes, known, known, self._first(hashes, known, known, owner, now), now)
                self._learn_chain(chain, len(hashes), snapshot, row, sent)

    def _learn_chain(self, chain: Sent, blocks: int, snapshot: Snapshot, row: int, sent: list[Sent]) -> None:
        """Adds one chain, which may cover only the beginning of its prompt. `blocks`: the length of the whole prompt in blocks."""
        hashes, owner = chain.hashes, chain.owner
        sent.append(chain)
        self.recent.append(chain)
        self._in_progress.add(chain)
        if len(hashes) >= LONG_BLOCKS:
            self._forget_for(len(hashes))
        unproven = len(hashes) - chain.known
        if unproven:
            before = self._unproven.get(owner, 0)
            if before + unproven > UNPROVEN_BLOCKS:
                room = self._room(snapshot, row)
                if (before + unproven) * UNPROVEN_SHARE > room:
                    chain.later = blocks <= room  # a longer prompt is never learned: the server cannot hold it
                    return
            self._unproven[owner] = before + unproven
            chain.unproven = unproven
            chain.taught = len(hashes)
        learned = landmarks(hashes, chain.first)
        if len(learned):
            self._index.learn(learned, owner)

    def _first(self, hashes: Hashes, known: int, sure: int, owner: int, now: float) -> int:
        """Returns from which block on the index learns a chain: from block 0, or from the first block that the endpoint does not hold.

        A server drops the least recently used blocks. So the index learns used blocks again, to drop the same blocks as the server. If a
        prompt waits for a prefill, the index learns no block again: the first token will show that the server has computed the prefix.
        """
        if not known or sure < known:
            return known
        key = owner, hashes.item(known - 1)
        since = self._refreshed.get(key)
        if since is not None and now - since < REFRESH_S:
            return known
        if len(self._refreshed) >= REFRESHED_MAX:
            self._refreshed.clear()
        self._refreshed[key] = now
        return 0

    def _room(self, snapshot: Snapshot, row: int) -> int:
        """Returns how many blocks the cache of an endpoint has room for, as the index assumes it."""
        sizes = snapshot.values.get(CACHE_TOKENS.name) if self._capacity.auto_tune else None
        if sizes is not None:
            tokens = float(sizes.item(row))
            if tokens >= self._block_tokens:  # not NaN
                return int(tokens) // self._block_tokens
        return self._capacity.blocks

    def _forget_for(self, blocks: int) -> None:
        """Forgets remembered chains to make room for a long chain, so that memory stays bounded: one chain may have 256 KB."""
        recent = self.recent
        for _ in range(min(blocks // LONG_BLOCKS, len(recent) - 1)):
            recent.popleft()

    def _root(self, request: Request) -> tuple[int, int]:
        """Returns the root of the chains of a request's prompts, and the seed of their block hashes."""
        model, salt = key = (request.target_model, request.cache_salt)
        start = self._roots.get(key)
        if start is None:
            start = root(model, salt, self._secret), seed(salt, self._secret)
            if len(salt) > SALT_CHARS_MAX:
                return start
            if len(self._roots) >= ROOTS_MAX:  # the cache is bounded, because clients choose names and salts
                self._roots.clear()
            self._roots[key] = start
        return start


def _words(prompt: PromptTokens) -> bytes:
    """Returns the bytes of a prompt's tokens for hashing."""
    ids = prompt.token_ids
    if ids is None:
        return b""
    return (with_media(ids, prompt.features) if prompt.features else ids).astype("<u4", copy=False).tobytes()


def _shared(failed: Sent, other: Sent) -> int:
    """Returns how many leading blocks of a failed chain stay: blocks known before, and blocks in common with the other chain."""
    known, most = failed.known, min(len(failed.hashes), len(other.hashes))
    if known >= most or failed.hashes.item(known) != other.hashes.item(known):
        return known
    differ = failed.hashes[known:most] != other.hashes[known:most]
    return known + int(differ.argmax()) if differ.any() else most
