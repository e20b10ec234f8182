import java.io.BufferedInputStream;
import java.io.DataInputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.Stream;

/** A store of a graph in which edges come and go, and questions about it: `bench/work/graph_store.rs` in Java. */
final class GraphStore {
    /** What a node and an edge take in the Rust program on std's types; the number of edges follows from them. */
    private static final long VERTEX_DATA_BYTES = 300;
    private static final long EDGE_DATA_BYTES = 88;
    private static final long DATA_PER_VERTEX = 640;
    /** Edges that arrive together. */
    private static final int LOG_EDGES = 1 << 16;
    /** How many of a hundred edges are in the first three quarters of the matrix, at each level. */
    private static final int[] FRIENDS = {45, 15, 15};
    /** Share of a rank that follows edges. */
    private static final double DAMPING = 0.85;
    /** Rounds of PageRank. */
    private static final int ROUNDS = 3;
    /** Nodes whose ranks are told. */
    private static final int TOP = 10;

    /** Node of the graph; threads could share it, and lock a map while they look at it. */
    private static final class Node {
        /** Key of this node in all maps, which is made once. */
        final Long id;
        final TreeMap<Long, Node> out = new TreeMap<>();
        final TreeMap<Long, Node> incoming = new TreeMap<>();
        private volatile double evenRank;
        private volatile double oddRank;
        /** Ids of neighbours that come later in the order of edges, sorted, while triangles are counted. */
        volatile long[] later;

        Node(Long id) {
            this.id = id;
        }

        double rank(int round) {
            return round % 2 == 0 ? evenRank : oddRank;
        }

        void setRank(int round, double rank) {
            if (round % 2 == 0) {
                evenRank = rank;
            } else {
                oddRank = rank;
            }
        }

        int outDegree() {
            synchronized (out) {
                return out.size();
            }
        }

        int degree() {
            synchronized (incoming) {
                return outDegree() + incoming.size();
            }
        }

        /** Is this node behind one with so many edges and this id, where nodes with few edges come first? */
        boolean isBehind(int degree, long other) {
            int own = degree();
            return own > degree || own == degree && id > other;
        }
    }

    private record Ranked(double rank, long id) {}

    private static final class Store {
        private final Map<Long, Node> byId = new HashMap<>();
        private final List<Node> nodes = new ArrayList<>();

        private Node node(Long id) {
            return byId.computeIfAbsent(id, key -> {
                Node node = new Node(key);
                nodes.add(node);
                return node;
            });
        }

        /** Adds an edge. Returns whether it is new. */
        boolean add(long fromId, long toId) {
            Node from = node(fromId);
            Node to = node(toId);
            synchronized (to.incoming) {
                to.incoming.put(from.id, from);
            }
            synchronized (from.out) {
                return from.out.put(to.id, to) == null;
            }
        }

        /** Removes an edge. Returns whether it was there. */
        boolean remove(long fromId, long toId) {
            Node from = byId.get(fromId);
            Node to = byId.get(toId);
            if (from == null || to == null) {
                return false;
            }
            synchronized (to.incoming) {
                to.incoming.remove(from.id);
            }
            synchronized (from.out) {
                return from.out.remove(to.id) != null;
            }
        }

        /** Computes the ranks of all nodes, and returns the first ones. */
        List<Ranked> pageRank() {
            double count = nodes.size();
            nodes.forEach(node -> node.setRank(0, 1.0 / count));
            for (int round = 0; round < ROUNDS; round++) {
                // What nodes without edges have goes to all.
                double lost = 0.0;
                for (Node node : nodes) {
                    lost += node.outDegree() == 0 ? node.rank(round) : 0.0;
                }
                double base = (1.0 - DAMPING + DAMPING * lost) / count;
                for (Node node : nodes) {
                    double sum = 0.0;
                    synchronized (node.incoming) {
                        for (Node from : node.incoming.values()) {
                            sum += from.rank(round) / from.outDegree();
                        }
                    }
                    node.setRank(round + 1, base + DAMPING * sum);
                }
            }
            Comparator<Ranked> order = Comparator.comparingDouble(Ranked::rank).reversed();
            return nodes.stream()
                    .map(node -> new Ranked(node.rank(ROUNDS), node.id))
                    .sorted(order.thenComparingLong(Ranked::id))
                    .limit(TOP)
                    .toList();
        }

        /** Counts the triangles, whatever the directions of their edges, at the node that comes first in the order. */
        long triangles() {
            for (Node node : nodes) {
                int degree = node.degree();
                List<Node> ends = new ArrayList<>();
                synchronized (node.out) {
                    ends.addAll(node.out.values());
                }
                synchronized (node.incoming) {
                    ends.addAll(node.incoming.values());
                }
                Stream<Node> later = ends.stream().filter(end -> end.isBehind(degree, node.id));
                node.later = later.mapToLong(end -> end.id).sorted().distinct().toArray();
            }
            long count = 0;
            for (Node node : nodes) {
                long[] ids = node.later;
                for (long id : ids) {
                    Node other = byId.get(id);
                    count += other == null ? 0 : common(ids, other.later);
                }
            }
            return count;
        }

        /** Counts what two sorted lists have in common. */
        private static long common(long[] one, long[] other) {
            int at = 0;
            long count = 0;
            for (long id : one) {
                while (at < other.length && other[at] < id) {
                    at++;
                }
                count += at < other.length && other[at] == id ? 1 : 0;
            }
            return count;
        }
    }

    /** Returns an edge, from and to: at each level it is in one of the quarters of what is left of the matrix. */
    private static int[] edge(long time, int scale, long seed) {
        int from = 0;
        int to = 0;
        long random = 0;
        int first = FRIENDS[0];
        int second = FRIENDS[1];
        int third = FRIENDS[2];
        for (int level = 0; level < scale; level++) {
            if (level % 4 == 0) {
                random = Harness.mix(Harness.mix(time ^ seed) + level);
            }
            long part = ((random & 0xFFFF) * 100) >>> 16;
            int row = part >= first + second ? 1 : 0;
            int column = part >= first && part < first + second || part >= first + second + third ? 1 : 0;
            from = from << 1 | row;
            to = to << 1 | column;
            random >>>= 16;
        }
        return new int[] {from, to};
    }

    /** Edges that arrive, in their order. */
    private interface Arrivals {
        long vertices();

        long edges();

        /** Returns the next edge, from and to. */
        int[] next() throws IOException;
    }

    /** Edges that are made up by the law of R-MAT. */
    private static final class MadeUp implements Arrivals {
        private final long seed;
        private final int scale;
        private final long edges;
        private long made;

        MadeUp(Harness harness) {
            seed = harness.seed;
            scale = 63 - Long.numberOfLeadingZeros(harness.dataBytes / DATA_PER_VERTEX);
            edges = (harness.dataBytes - (VERTEX_DATA_BYTES << scale)) / EDGE_DATA_BYTES;
        }

        @Override
        public long vertices() {
            return 1L << scale;
        }

        @Override
        public long edges() {
            return edges;
        }

        @Override
        public int[] next() {
            return edge(made++, scale, seed);
        }
    }

    /** Edges of a real graph, in a file of the Rust program: all numbers have four bytes, the highest first. */
    private static final class Links implements Arrivals {
        private final DataInputStream file;
        private final long vertices;
        private final long edges;

        Links(Path path) throws IOException {
            file = new DataInputStream(new BufferedInputStream(Files.newInputStream(path)));
            vertices = Integer.toUnsignedLong(file.readInt());
            edges = Integer.toUnsignedLong(file.readInt());
        }

        @Override
        public long vertices() {
            return vertices;
        }

        @Override
        public long edges() {
            return edges;
        }

        @Override
        public int[] next() throws IOException {
            return new int[] {file.readInt(), file.readInt()};
        }
    }

    public static void main(String[] arguments) throws IOException {
        Harness harness = new Harness(arguments);
        Arrivals arrivals = harness.links == null ? new MadeUp(harness) : new Links(harness.links);
        long vertices = arrivals.vertices();
        long edges = arrivals.edges();
        Store store = new Store();
        // Number of edges now.
        long[] count = {0};
        // Edges that are removed later are the first ones.
        int old = (int) Math.min(harness.ops, edges);
        int[] oldEnds = new int[2 * old];
        int[] log = new int[2 * LOG_EDGES];
        for (long made = 0; made < edges; made += LOG_EDGES) {
            int size = (int) Math.min(LOG_EDGES, edges - made);
            for (int at = 0; at < size; at++) {
                System.arraycopy(arrivals.next(), 0, log, 2 * at, 2);
            }
            int kept = (int) Math.max(0, Math.min(size, old - made));
            if (kept > 0) {
                System.arraycopy(log, 0, oldEnds, (int) (2 * made), 2 * kept);
            }
            harness.phase("fill", size, () -> {
                for (int at = 0; at < size; at++) {
                    count[0] += store.add(log[2 * at], log[2 * at + 1]) ? 1 : 0;
                }
                return null;
            });
        }
        Harness.Random random = new Harness.Random(harness.seed);
        harness.phase("change", harness.ops, () -> {
            for (int at = 0; at < old; at++) {
                count[0] -= store.remove(oldEnds[2 * at], oldEnds[2 * at + 1]) ? 1 : 0;
                count[0] += store.add(oldEnds[2 * at], random.below(vertices)) ? 1 : 0;
            }
            return null;
        });
        List<Ranked> ranked = harness.phase("rank", edges, store::pageRank);
        long triangles = harness.phase("triangles", edges, store::triangles);
        harness.all("all", "fill", "change", "rank", "triangles");
        long ranks = 0;
        for (Ranked one : ranked) {
            ranks = Harness.mix(ranks ^ Double.doubleToRawLongBits(one.rank) ^ one.id);
        }
        harness.figure("edges", count[0]);
        harness.figure("triangles", triangles);
        harness.end(Harness.mix(ranks ^ triangles) ^ count[0], 0, store);
    }
}
