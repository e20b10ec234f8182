import com.sun.management.GarbageCollectionNotificationInfo;
import com.sun.management.OperatingSystemMXBean;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.management.GarbageCollectorMXBean;
import java.lang.management.ManagementFactory;
import java.lang.ref.Reference;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Supplier;
import java.util.stream.Stream;
import javax.management.NotificationEmitter;
import javax.management.openmbean.CompositeData;

/** Arguments, timed phases and the result line of a workload, the same as in the Rust programs (`bench/work`). */
final class Harness {
    final long dataBytes;
    final long ops;
    final long seed;
    final long zipfPercent;
    /** File of the edges of a real graph, as the Rust program leaves it; null if data is made up. */
    final Path links;
    private final boolean isMeasured;
    private final List<Phase> phases = new ArrayList<>();
    private final Map<String, Double> figures = new LinkedHashMap<>();
    private final Pauses pauses = new Pauses();

    Harness(String[] arguments) {
        Map<String, Long> numbers = new LinkedHashMap<>(Map.of("data-mib", 64L, "ops", 0L, "seed", 42L));
        numbers.putAll(Map.of("zipf-percent", 0L, "real", 0L, "measure", 0L));
        Map<String, String> texts = new LinkedHashMap<>(Map.of("graph", "", "links", ""));
        for (int at = 0; at < arguments.length; at += 2) {
            String name = arguments[at].replaceFirst("^--", "");
            if (!numbers.containsKey(name) && !texts.containsKey(name) || at + 1 == arguments.length) {
                throw new IllegalArgumentException("unknown argument or no value: " + arguments[at]);
            }
            if (texts.containsKey(name)) {
                texts.put(name, arguments[at + 1]);
            } else {
                numbers.put(name, Long.parseLong(arguments[at + 1]));
            }
        }
        dataBytes = numbers.get("data-mib") << 20;
        ops = numbers.get("ops");
        seed = numbers.get("seed");
        zipfPercent = numbers.get("zipf-percent");
        links = texts.get("links").isEmpty() ? null : Path.of(texts.get("links"));
        if (numbers.get("real") != 0 && links == null) {
            throw new IllegalArgumentException("real data is known to the Rust programs only");
        }
        isMeasured = numbers.get("measure") == 1;
    }

    /** One step of splitmix64: the value is a good hash of its argument. */
    static long mix(long x) {
        x += 0x9E3779B97F4A7C15L;
        x = (x ^ (x >>> 30)) * 0xBF58476D1CE4E5B9L;
        x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL;
        return x ^ (x >>> 31);
    }

    /** Xorshift. */
    static final class Random {
        private long state;

        Random(long seed) {
            state = mix(seed) | 1;
        }

        long next() {
            state ^= state << 13;
            state ^= state >>> 7;
            state ^= state << 17;
            return state;
        }

        /** Returns a number below `end`, which is positive. */
        long below(long end) {
            long next = next();
            // The high half of an unsigned product.
            return Math.multiplyHigh(next, end) + ((next >> 63) & end);
        }
    }

    private static final class Phase {
        final String name;
        long ops;
        long ns;
        long cpuNs;
        long faultsMajor;
        long faultsMinor;

        Phase(String name) {
            this.name = name;
        }

        String line() {
            String times = String.format("\"seconds\":%s,\"cpu_seconds\":%s", ns / 1e9, cpuNs / 1e9);
            String faults = String.format("\"faults_major\":%d,\"faults_minor\":%d", faultsMajor, faultsMinor);
            return String.format("{\"name\":\"%s\",\"ops\":%d,%s,%s}", name, ops, times, faults);
        }

        void add(Phase more) {
            ops += more.ops;
            ns += more.ns;
            cpuNs += more.cpuNs;
            faultsMajor += more.faultsMajor;
            faultsMinor += more.faultsMinor;
        }
    }

    /** Time, processor time of all threads, and page faults until now. */
    private record Usage(long ns, long cpuNs, long faultsMinor, long faultsMajor) {
        private static final OperatingSystemMXBean SYSTEM =
                (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

        static Usage now() {
            // The name of the program, in parentheses, may have spaces; the state is the first field behind it.
            String stat = read("/proc/self/stat");
            String[] fields = stat.substring(stat.lastIndexOf(')') + 2).split(" ");
            long faultsMinor = Long.parseLong(fields[7]);
            long faultsMajor = Long.parseLong(fields[9]);
            return new Usage(System.nanoTime(), SYSTEM.getProcessCpuTime(), faultsMinor, faultsMajor);
        }
    }

    /** Times `ops` operations; adds them to what the phase has already, if it is the last one. */
    <R> R phase(String name, long ops, Supplier<R> work) {
        Usage before = Usage.now();
        R result = work.get();
        Usage after = Usage.now();
        Phase phase = new Phase(name);
        phase.ops = ops;
        phase.ns = after.ns - before.ns;
        phase.cpuNs = after.cpuNs - before.cpuNs;
        phase.faultsMajor = after.faultsMajor - before.faultsMajor;
        phase.faultsMinor = after.faultsMinor - before.faultsMinor;
        add(phase);
        return result;
    }

    private void add(Phase more) {
        if (phases.isEmpty() || !phases.get(phases.size() - 1).name.equals(more.name)) {
            phases.add(new Phase(more.name));
        }
        phases.get(phases.size() - 1).add(more);
    }

    /** Adds a phase that is all of these. */
    void all(String name, String... parts) {
        for (Phase part : List.copyOf(phases)) {
            if (Arrays.asList(parts).contains(part.name)) {
                Phase more = new Phase(name);
                more.add(part);
                add(more);
            }
        }
    }

    void figure(String name, double value) {
        figures.put(name, value);
    }

    /**
     * Prints the result line and ends the program. With `--measure 1` it also says what lives in the heap and what the
     * JVM has beside it; `data` is what has to live until then.
     */
    void end(long checksum, long errors, Object data) {
        if (isMeasured) {
            figure("own_bytes", bytesBesideHeap());
            System.gc();
            figure("live_bytes", ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed());
        }
        Reference.reachabilityFence(data);
        pauses.report(this);
        List<String> shown = new ArrayList<>();
        for (Phase phase : phases) {
            shown.add(phase.line());
        }
        List<String> values = new ArrayList<>();
        figures.forEach((name, value) -> values.add("\"" + name + "\":" + value));
        System.out.printf(
                "{\"phases\":[%s],\"checksum\":\"%016x\",\"verified\":%b,\"errors\":%d,\"figures\":{%s}}%n",
                String.join(",", shown), checksum, errors == 0, errors, String.join(",", values));
        System.exit(errors == 0 ? 0 : 1);
    }

    /**
     * Returns the anonymous memory beside a heap that is resident as a whole (`-XX:+AlwaysPreTouch`). Files that the
     * JVM maps are not part of it: no limit charges them, as they are in memory from the run before.
     */
    private static long bytesBesideHeap() {
        Stream<String> lines = read("/proc/self/status").lines().filter(line -> line.startsWith("RssAnon:"));
        long anonymous = Long.parseLong(lines.findFirst().orElseThrow().split("\\s+")[1]) << 10;
        // ZGC has its heap in shared memory.
        boolean isShared = collectors().stream().anyMatch(bean -> bean.getName().startsWith("ZGC"));
        long heap = isShared ? 0 : ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getCommitted();
        return anonymous - heap;
    }

    private static String read(String path) {
        try {
            return Files.readString(Path.of(path));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static List<GarbageCollectorMXBean> collectors() {
        return ManagementFactory.getGarbageCollectorMXBeans();
    }

    /** Times for which a collector stopped the program, in milliseconds, as the JVM notifies of them. */
    private static final class Pauses {
        private static final long PATIENCE_NS = 1_000_000_000L;
        private final List<Long> milliseconds = new ArrayList<>();

        Pauses() {
            for (GarbageCollectorMXBean bean : collectors()) {
                if (isPause(bean)) {
                    ((NotificationEmitter) bean).addNotificationListener((notification, ignored) -> {
                        CompositeData data = (CompositeData) notification.getUserData();
                        add(GarbageCollectionNotificationInfo.from(data).getGcInfo().getDuration());
                    }, null, null);
                }
            }
        }

        /** ZGC and Shenandoah have a bean of cycles, which run beside the program, and one of pauses. */
        private static boolean isPause(GarbageCollectorMXBean bean) {
            return !bean.getName().endsWith("Cycles");
        }

        private synchronized void add(long duration) {
            milliseconds.add(duration);
            notifyAll();
        }

        private static long count(boolean ofPauses) {
            return collectors().stream()
                    .filter(bean -> isPause(bean) == ofPauses)
                    .mapToLong(GarbageCollectorMXBean::getCollectionCount)
                    .sum();
        }

        /** Waits for the notifications that are under way, at most for a second. */
        private synchronized void await() {
            long deadline = System.nanoTime() + PATIENCE_NS;
            try {
                while (milliseconds.size() < count(true) && System.nanoTime() < deadline) {
                    wait(10);
                }
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
        }

        synchronized void report(Harness harness) {
            await();
            long[] sorted = milliseconds.stream().mapToLong(Long::longValue).sorted().toArray();
            long cycles = count(false);
            harness.figure("collections", cycles > 0 ? cycles : sorted.length);
            if (sorted.length > 0) {
                harness.figure("longest_pause_ms", sorted[sorted.length - 1]);
                harness.figure("pause_p90_ms", sorted[sorted.length * 90 / 100]);
                harness.figure("pause_p99_ms", sorted[sorted.length * 99 / 100]);
                harness.figure("mean_pause_ms", Arrays.stream(sorted).average().orElse(0));
            }
        }
    }
}
