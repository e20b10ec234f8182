import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/** A cache that evicts by second chance within a limit: `bench/work/gc_cache.rs` in Java. */
final class GcCache {
    /** Sizes of values, in bytes. */
    private static final int SIZE_MIN = 64;
    private static final int SIZE_MAX = 1024;
    private static final int KEY_BYTES = 12;
    /** Requests that set without asking. */
    private static final long SETS_PER_MILLE = 126;
    /** Keys for each value that fits. */
    private static final long KEYS_PER_ENTRY = 2;
    /** What an entry counts beside its key and its data. */
    private static final long ENTRY_BYTES = 84;
    /** What an entry counts against the limit of the cache. */
    private static final long COUNTED_BYTES = KEY_BYTES + (SIZE_MIN + SIZE_MAX) / 2 + ENTRY_BYTES;
    /** What an entry takes in the Rust program on std's types; the number of entries follows from it. */
    private static final long ENTRY_DATA_BYTES = 810;

    private static final class Stored {
        /** When it is gone, in seconds; 0 for never. */
        volatile long expires;
        final long version;
        volatile boolean isUsed;
        final byte[] data;

        Stored(long version, byte[] data) {
            this.version = version;
            this.data = data;
        }
    }

    /** Keys and values that threads could share. */
    private static final class Cache {
        private final Map<String, Stored> map = new HashMap<>();
        /** Keys in the order in which they came; the hand is at the front. */
        private final ArrayDeque<String> keys = new ArrayDeque<>();
        private final long capacity;
        private long used;
        private long versions;
        long gets;
        long hits;
        long evictions;

        Cache(long capacity) {
            this.capacity = capacity;
        }

        /** Seconds, by a clock at which no value ends. */
        private static long now() {
            return 1;
        }

        private static boolean isGone(Stored stored) {
            long expires = stored.expires;
            return expires != 0 && expires <= now();
        }

        private static long size(String key, byte[] data) {
            return key.length() + data.length + ENTRY_BYTES;
        }

        private boolean hasRoom(long more) {
            return used + more <= capacity;
        }

        /** Returns the value of a key, or null. */
        synchronized byte[] get(String key) {
            gets++;
            Stored stored = map.get(key);
            if (stored == null || isGone(stored)) {
                return null;
            }
            if (!stored.isUsed) {
                stored.isUsed = true;
            }
            hits++;
            return stored.data;
        }

        synchronized void set(String key, byte[] data) {
            for (int attempt = 0; attempt <= 8; attempt++) {
                if (put(key, data)) {
                    return;
                }
                evict(size(key, data));
            }
            throw new IllegalStateException("set: there is no room");
        }

        /** Puts a value in, if there is room. */
        private boolean put(String key, byte[] data) {
            versions++;
            Stored before = map.get(key);
            long more = size(key, data) - (before == null ? 0 : size(key, before.data));
            if (more > 0 && !hasRoom(more)) {
                return false;
            }
            if (before == null) {
                keys.addLast(key);
            }
            map.put(key, new Stored(versions, data));
            used += more;
            return true;
        }

        /** Makes so much room. */
        private void evict(long need) {
            long goal = Math.max(used - need, 0);
            long turns = 2L * keys.size() + 1;
            while (!(hasRoom(need) && used <= goal) && turns > 0) {
                turns--;
                String key = keys.pollFirst();
                if (key == null) {
                    return;
                }
                Stored stored = map.get(key);
                if (stored == null) {
                    continue;
                }
                boolean wasUsed = stored.isUsed;
                if (!isGone(stored) && wasUsed) {
                    stored.isUsed = false;
                    keys.addLast(key);
                    continue;
                }
                used -= size(key, stored.data);
                map.remove(key);
                evictions++;
            }
        }
    }

    /** Zipf's law by rejection and inversion (Hörmann and Derflinger, 1996). */
    private static final class Zipf {
        private final double count;
        private final double exponent;
        private final double first;
        private final double last;
        private final double shift;

        Zipf(long count, double exponent) {
            this.count = count;
            this.exponent = exponent;
            first = integral(1.5) - 1.0;
            last = integral(count + 0.5);
            shift = 2.0 - inverse(integral(2.5) - density(2.0));
        }

        /** Returns a number; 0 is the most popular. */
        long sample(Harness.Random random) {
            while (true) {
                double unit = (random.next() >>> 11) / (double) (1L << 53);
                double at = last + unit * (first - last);
                double x = inverse(at);
                double k = Math.min(Math.max(Math.floor(x + 0.5), 1.0), count);
                if (k - x <= shift || at >= integral(k + 0.5) - density(k)) {
                    return (long) k - 1;
                }
            }
        }

        private double density(double x) {
            return Math.exp(-exponent * Math.log(x));
        }

        private double integral(double x) {
            double log = Math.log(x);
            double t = (1.0 - exponent) * log;
            return (Math.abs(t) > 1e-8 ? Math.expm1(t) / t : 1.0) * log;
        }

        private double inverse(double y) {
            double t = Math.max(y * (1.0 - exponent), -1.0);
            return Math.exp((Math.abs(t) > 1e-8 ? Math.log1p(t) / t : 1.0) * y);
        }
    }

    /** What is asked for, and what has been found. */
    private static final class Requests {
        private final long count;
        private final Zipf zipf;
        private final Harness.Random random;
        private final long seed;
        /** Values that were made. */
        private int versions;
        long sum;
        long errors;

        Requests(Harness harness, long count) {
            this.count = count;
            zipf = new Zipf(count, harness.zipfPercent / 100.0);
            random = new Harness.Random(harness.seed);
            seed = harness.seed;
        }

        /** Makes the next request. */
        void one(Cache cache) {
            // Popular keys are anywhere among those of the fill.
            long number = Long.remainderUnsigned(Harness.mix(zipf.sample(random)), count);
            if (random.below(1000) < SETS_PER_MILLE) {
                set(cache, number);
                return;
            }
            byte[] value = cache.get(key(number));
            long found = 0;
            if (value != null) {
                int version = version(value);
                if (isRight(number, value)) {
                    found = Integer.toUnsignedLong(version);
                } else {
                    errors++;
                }
            }
            sum = Long.rotateLeft(sum + found, 1);
            if (value == null) {
                set(cache, number);
            }
        }

        void set(Cache cache, long number) {
            versions++;
            byte[] value = new byte[size(number, versions)];
            Arrays.fill(value, (byte) number);
            int check = (int) Harness.mix(number ^ Integer.toUnsignedLong(versions));
            ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN).putInt(versions).putInt(check);
            cache.set(key(number), value);
        }

        private String key(long number) {
            ByteBuffer key = ByteBuffer.allocate(KEY_BYTES).order(ByteOrder.LITTLE_ENDIAN);
            key.putLong(Harness.mix(number ^ seed)).putInt((int) number);
            return new String(key.array(), StandardCharsets.ISO_8859_1);
        }

        /** Returns the bytes of this version of a key's value. */
        private static int size(long number, int version) {
            long hash = Harness.mix(number ^ Integer.toUnsignedLong(version) << 32);
            return SIZE_MIN + (int) Long.remainderUnsigned(hash, SIZE_MAX + 1 - SIZE_MIN);
        }

        private static int version(byte[] value) {
            return ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN).getInt();
        }

        private static boolean isRight(long number, byte[] value) {
            int version = version(value);
            int check = ByteBuffer.wrap(value).order(ByteOrder.LITTLE_ENDIAN).getInt(4);
            return check == (int) Harness.mix(number ^ Integer.toUnsignedLong(version))
                    && value.length == size(number, version)
                    && value[value.length - 1] == (byte) number;
        }
    }

    public static void main(String[] arguments) {
        Harness harness = new Harness(arguments);
        long entries = harness.dataBytes / ENTRY_DATA_BYTES;
        long keys = entries * KEYS_PER_ENTRY;
        Cache cache = new Cache(entries * COUNTED_BYTES);
        Requests requests = new Requests(harness, keys);
        harness.phase("fill", keys, () -> {
            for (long number = 0; number < keys; number++) {
                requests.set(cache, number);
            }
            return null;
        });
        for (long request = 0; request < harness.ops; request++) {
            requests.one(cache);
        }
        long gets = cache.gets;
        long hits = cache.hits;
        harness.phase("request", harness.ops, () -> {
            for (long request = 0; request < harness.ops; request++) {
                requests.one(cache);
            }
            return null;
        });
        gets = cache.gets - gets;
        hits = cache.hits - hits;
        harness.figure("hits", hits);
        harness.figure("hit_percent", hits * 100.0 / Math.max(gets, 1));
        harness.figure("evictions", cache.evictions);
        harness.end(Harness.mix(requests.sum ^ hits) ^ cache.evictions, requests.errors, cache);
    }
}
