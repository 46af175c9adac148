"""The base class of all plugins, their registry, and the services that `start` gets. Plugin authors import these from `epp.plugin`."""

import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Endpoint, EndpointList, Mask
from epp.data import Datum, Key
from epp.learning.model import FirstToken, LatencyModel
from epp.metrics import Metric

Hashes = NDArray[np.uint64]


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `Params` of a plugin without parameters."""


class LoadCounts(Protocol):
    """Counts tokens in flight per endpoint. A worker writes its own counts; the column INFLIGHT_TOKENS is the sum over all workers."""

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        """Adds `tokens` to this worker's count of an endpoint. To release tokens, add the negative number.

        This also works if the endpoint has left the pool since the decision.
        """


class PrefixIndex(Protocol):
    """Knows which endpoint caches which blocks of prompts. All workers share the index.

    `hashes` is a chain of block hashes: uint64, one per block, each over its block and all blocks before it (`epp.prefix`).
    `owner` is `Endpoint.owner`.
    """

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        """Returns owner -> how many leading blocks of the chain it caches, for each owner that caches the first block. Never waits."""

    def learn(self, hashes: Hashes, owner: int) -> None:
        """Records that `owner` will cache these blocks. Never waits.

        The update is queued; if there is no room, it is dropped and counted.
        """

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Undoes `learn`, because `owner` does not cache these blocks after all. Never waits."""


class Prefills(Protocol):
    """Knows which prompts endpoints compute at this moment. Each worker sees the prompts of all workers at once. No call waits.

    `hashes` and `owner` are those of `PrefixIndex`, times are monotonic seconds.
    """

    def begins(self, hashes: Hashes, owner: int, known: int, tokens: float, now: float) -> int:
        """Shows that a prompt is sent to `owner` now. Returns the number to pass to `ends`.

        `known`: how many leading blocks the owner caches already. `tokens`: how many prompt tokens the owner has to compute.
        """

    def ends(self, prefill: int) -> None:
        """Records that a prefill has ended: the first token has come, or no token will come."""

    def under_way(self, hashes: Hashes, now: float) -> Sequence[tuple[int, int, float, float]]:
        """Returns the prefills that compute leading blocks of this chain, as (owner, blocks, since, tokens).

        `blocks`: how many leading blocks the owner will cache after the prefill. `since`: when the prompt was sent. `tokens`: how many
        tokens the owner computes.
        """


class HeldView(NamedTuple):
    """Says which endpoints of a list are followed: the picker knows which blocks they hold (`epp.prefix.streams`).

    `followed`: bool, shape (endpoints,). `whole`: the same, without endpoints with unknown older blocks. `why`: per endpoint, why
    its matches are not precise; "" if they are precise.
    `block_tokens`: per endpoint, the tokens per block; 0 if unknown. `sizes`: the different `block_tokens` of the followed endpoints, the
    most frequent first; empty if no endpoint is followed.
    `adapters`: the LoRA adapters that KV events have named, as hash words (`epp.prefix.held.adapter_word`).
    """

    sizes: Sequence[int]
    followed: Mask
    whole: Mask
    block_tokens: Sequence[int]
    why: Sequence[str]
    adapters: frozenset[int]


class HeldBlocks(Protocol):
    """Knows what the model servers say they hold (`Services.held_blocks`). `hashes`: keys of whole blocks (`epp.prefix.held`), uint64."""

    def view(self, endpoint_list: EndpointList, now: float) -> HeldView:
        """Returns which endpoints are followed. `now`: monotonic seconds."""

    def match(self, view: HeldView, hashes: Hashes, block_tokens: int) -> tuple[list[int], list[int]]:
        """Returns two lists over the endpoints: how many leading blocks each holds, and the sum of these blocks' weights.

        The tier of a block determines its weight, in thousandths. Both numbers are 0 for an endpoint that is not followed or has another
        block size than `block_tokens`.
        """

    def measure(self, latency: "Measure") -> None:
        """Makes every later `match` report its duration in seconds to `latency`."""

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        """Records that the endpoint with this owner id (`Endpoint.owner`) will hold these blocks soon. Never waits.

        Has no effect if the endpoint's blocks have another size than `block_tokens`.
        """


class Learning(Protocol):
    """Knows what answers have taught about the latencies of endpoints. One process learns, and all workers predict."""

    def model(self) -> LatencyModel:
        """Returns the present model, to predict with. Only `learn_first` and `learn_token` may change it."""

    def starts(self) -> NDArray[np.float64]:
        """Returns since when each endpoint has worked on its first prompt without a first token, in monotonic seconds; 0 if not known.

        float64, shape (workers, CELLS, slots). For each slot, the newest value is valid. The methods `follows` and `counts` describe the
        other cells.
        """

    def begins(self, slot: int, now: float) -> None:
        """Records that the endpoint starts to compute a prompt now: another prompt got its first token, or the endpoint had no prompt."""

    def follows(self, slot: int, tokens: float) -> None:
        """Records that a prompt of `tokens` tokens was sent to an endpoint that, since its last start, works on other prompts."""

    def counts(self, slot: int, prompts: int) -> None:
        """Adds to the number of prompts whose tokens are in INFLIGHT_TOKENS of an endpoint."""

    def learn_first(self, seen: FirstToken) -> None:
        """Reports a time to the first token to `LatencyModel.learn_first`. Never waits."""

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        """Reports a time per output token to `LatencyModel.learn_token`. Never waits."""


class Measure(Protocol):
    """Records values of a histogram that a plugin declares in `metrics`."""

    def observe(self, value: float) -> None:
        """Adds one value, in the unit of the metric's buckets."""


class Count(Protocol):
    """Increments a counter that a plugin declares in `metrics`."""

    def add(self, *labels: str, n: int = 1) -> None:
        """Adds `n` to the counter. `labels` are the values of `Metric.labels`, in that order."""


class Gauge(Protocol):
    """Sets a gauge that a plugin declares in `metrics`. The metrics page combines the workers' values by `Metric.over_workers`."""

    def set(self, value: float, *labels: str, weight: float = 1.0) -> None:
        """Sets this worker's value. `labels` are the values of `Metric.labels`, in that order. Digits below 0.000001 are lost.

        `weight`: the weight of the value in the mean over the workers; 0 removes the value from the page.
        """


class Waiting(Protocol):
    """A result that is not available yet. Only `Services` makes one.

    `await` returns the result of the work or raises its exception. Several requests may await the same object. If all of them leave
    before the work is done, the work is cancelled.
    """

    def __await__(self) -> Any: ...
    def add_done_callback(self, call: Callable[[Any], object], /) -> Any: ...


class HttpAnswer(NamedTuple):
    """Holds the result of `Services.http`."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    seconds: float = 0.0  # from the start of the request to the last byte of the response


class Services(Protocol):
    """What a plugin may use of the picker; `start` gets it. All methods must be called on the worker's event loop; none blocks.

    `rng`: the source of randomness of this worker. `load`: tokens in flight. `prefix_index`: see `PrefixIndex`; `prefix_seed`: the seed of
    the hashes in this index, the same in all workers. `held_blocks`: what model servers say they hold; exists only if a configured producer
    reads KV events. `prefills`: the prompts that are computed now. `learning`: what answers have taught about latencies.
    `environment`: the process's environment variables.
    """

    rng: random.Random
    load: LoadCounts
    prefix_index: PrefixIndex
    prefix_seed: int
    held_blocks: HeldBlocks
    prefills: Prefills
    learning: Learning
    environment: Mapping[str, str]

    def of(self, plugin: "Plugin") -> "Services":
        """Returns the same services for one plugin, so that the log can name the plugin if its work fails. The runtime calls this."""

    def measure(self, plugin: "Plugin", metric: Metric) -> Measure:
        """Returns the handle of a histogram. Raises PluginFault if the plugin's class does not declare it in `metrics`."""

    def count(self, plugin: "Plugin", metric: Metric) -> Count:
        """Returns the handle of a counter. Raises PluginFault if the plugin's class does not declare it in `metrics`."""

    def gauge(self, plugin: "Plugin", metric: Metric) -> Gauge:
        """Returns the handle of a gauge. Raises PluginFault if the plugin's class does not declare it in `metrics`."""

    def warn(self, plugin: "Plugin", event: str, **fields: object) -> None:
        """Logs a warning: at most one line per plugin in 10 seconds, with the number of suppressed lines.

        `event` must be the same text each time. Put counts, names and reasons into `fields`.
        """

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Waiting:
        """Runs a coroutine concurrently with the requests. After `timeout_s` the coroutine is cancelled, and awaiting it raises
        TimeoutError.

        Work that is never awaited runs to its end; its exception is logged. Raises ProducerFailed if too many coroutines are running,
        or the worker is ending.
        """

    def http(self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, timeout_s: float) -> Waiting:
        """Sends one HTTP request. Awaiting the result gives an `HttpAnswer`, whatever its status.

        Awaiting raises TimeoutError after `timeout_s`, and OSError if there is no complete response. Redirects are not followed. The
        call itself raises ProducerFailed, as `spawn` does.
        """

    def after(self, seconds: float) -> Waiting:
        """Returns a wait that ends after `seconds`. The call raises ProducerFailed, as `spawn` does."""

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        """Calls `act` every `seconds` until the worker ends. `act` must not block; its exceptions are logged, and calls go on."""


class Plugin:
    """The base class of all extension points. An instance is made from one entry of the configuration.

    Class attributes:
        type_name, aliases   set by `@plugin`
        Params               the parameters: a frozen msgspec struct with forbid_unknown_fields
        metrics              counters, gauges, and histograms without labels, that the plugin fills (`Services.count`, `gauge`, `measure`)
        counts_with          parameters that have an effect only with some values of another parameter: parameter -> (the other parameter,
                             these values), with `.` between levels; `epp config check` warns of parameters that are given without effect
        one_worker           whether all requests must share the plugin's state: the picker then runs with a single worker

    Attributes that the class or the constructor sets: which data (`epp.data`) and headers the plugin uses:
        consumes             keys that the plugin reads. Another plugin or the scraper must produce them, else the picker does not start
        optional             data that the plugin reads if another plugin produces them; else it gets the defaults of the data
        produces             data that the plugin writes for other plugins
        keeps                data that the plugin writes and reads itself, between its calls for one request
        reads_headers        names of the request headers that the plugin reads, in lower case: a recording says which requests have equal
                             values, and the picker recognizes a request that crashes workers by body, path and these headers

    Attributes that the constructor sets, each logged or checked at start:
        without_effect       texts `parameter: why it has no effect`. A parameter with a description that begins with "Accepted, without
                             effect" needs no text: it is named if it has another value than its default
        renamed              older parameters -> their current names, both with `.` between levels; set by the class, and read by
                             `epp config check --migrate`
        deprecated           the older parameters of `renamed` that the configuration gives
        needs                plugins that parameters name; they must exist and be of the given kind. `resolve` gets them

    Order of calls: constructor, `meet`, `resolve` (before the fork), `start` (in each worker), after a reload `take_over`, then the
    extension points.
    """

    type_name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    Params: ClassVar[type[msgspec.Struct]] = NoParams
    metrics: ClassVar[tuple[Metric, ...]] = ()
    one_worker: ClassVar[bool] = False
    consumes: Sequence[Key[Any]] = ()
    produces: Sequence[Key[Any]] = ()
    optional: Sequence[Datum[Any]] = ()
    keeps: Sequence[Datum[Any]] = ()
    reads_headers: Sequence[str] = ()
    counts_with: ClassVar[Mapping[str, tuple[str, tuple[object, ...]]]] = {}
    without_effect: Sequence[str] = ()
    renamed: ClassVar[Mapping[str, str]] = {}
    deprecated: Mapping[str, str] = {}
    needs: Mapping[str, "Need"] = {}

    def __init__(self, name: str, params: Any) -> None:
        """`name`: the instance's name in the configuration. `params`: an instance of `Params`.

        Runs before the fork: no event loop, thread, socket or randomness. An exception refuses the configuration; a ValueError with
        the text `parameter: reason` names the parameter's place in the file.
        """
        self.name = name
        self.params = params

    def meet(self, plugins: Sequence["Plugin"]) -> None:
        """Gets all plugins that the configuration lists, to adapt this plugin's declarations to them. Called once, before the fork."""

    def resolve(self, found: Mapping[str, "Plugin"]) -> None:
        """Gets the plugins of `needs`, under the same keys. Called once, before the fork."""

    def start(self, services: Services) -> None:
        """Called once in each worker, after the fork and before the first request. If it raises, the worker does not start."""

    def take_over(self, predecessor: "Plugin") -> None:
        """Called after `start` when the configuration is reloaded. The plugin takes over what the predecessor has learned in this worker.

        `predecessor` has the same name and type, but maybe other parameters, and another class if the plugin's file has changed. The
        predecessor still serves requests that began before the reload. Data in shared memory (`Services`) need no takeover.
        """


class Need(NamedTuple):
    """Refers to a plugin that a parameter names.

    `parameter`: the path of the parameter, as in `deciders.prefill`. `name`: the name of the plugin. `kind`: the class that it must have.
    """

    parameter: str
    name: str
    kind: type[Plugin]


P = TypeVar("P", bound=type[Plugin])
REGISTERED: dict[str, type[Plugin]] = {}
# type -> the module that defines it, imported or not; `epp.config.registry` reads this from the sources
BUILT_IN: dict[str, str] = {}
OWN_PACKAGE: Final = "epp.plugins."


def plugin(type_name: str, *aliases: str) -> Callable[[P], P]:
    """Registers a plugin class under the type name that configurations use, and under other names (`aliases`).

    Raises ValueError if a name is not printable text, or is registered for another class.
    """

    def register(cls: P) -> P:
        for name in (type_name, *aliases):
            if not (isinstance(name, str) and name.isprintable() and name == name.strip() != ""):
                raise ValueError(f"plugin type {name!r}: a type's name must be printable text, without spaces around it")
            other = REGISTERED.get(name, cls)
            own_module = BUILT_IN.get(name, other.__module__)
            if (own_module, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"plugin type '{name}' is registered by {own_module} and by {cls.__module__}")
            REGISTERED[name] = cls
        cls.type_name = type_name
        cls.aliases = aliases
        return cls

    return register


def foreign(cls: type[Plugin]) -> bool:
    """Returns whether a plugin class is foreign: not shipped with the picker."""
    return not cls.__module__.startswith(OWN_PACKAGE)
