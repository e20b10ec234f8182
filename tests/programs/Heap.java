import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;

/** A heap that the collector must walk: maps of strings made and dropped by several threads, a linked structure that survives. */
public class Heap {
    static final class Node {
        final Node next;
        final byte[] payload;

        Node(Node next, int seed) {
            this.next = next;
            payload = new byte[200 + seed % 300];
            for (int i = 0; i < payload.length; i++) payload[i] = (byte) (seed * 31 + i);
        }
    }

    static long mix(long x) {
        x ^= x >>> 30;
        x *= 0xbf58476d1ce4e5b9L;
        x ^= x >>> 27;
        x *= 0x94d049bb133111ebL;
        return x ^ (x >>> 31);
    }

    public static void main(String[] arguments) throws Exception {
        int megabytes = Integer.parseInt(arguments[0]);
        Node live = null;
        for (int i = 0; i < megabytes * 2500; i++) live = new Node(live, i);
        AtomicLong total = new AtomicLong();
        List<Thread> threads = new ArrayList<>();
        for (int t = 0; t < 3; t++) {
            final int me = t;
            Thread thread = new Thread(() -> {
                for (int round = 0; round < 4; round++) {
                    HashMap<String, long[]> map = new HashMap<>();
                    for (int i = 0; i < 20000; i++) map.put("key " + mix(i + me * 1000003L), new long[] {i, round, me});
                    long sum = 0;
                    for (int i = 0; i < 20000; i++) sum += map.get("key " + mix(i + me * 1000003L))[0];
                    total.addAndGet(sum + map.size());
                }
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads) thread.join();
        System.gc();
        long hash = 0;
        int length = 0;
        for (Node node = live; node != null; node = node.next, length++)
            for (int i = 0; i < node.payload.length; i += 7) hash = hash * 31 + node.payload[i];
        byte[] big = new byte[megabytes << 18];
        for (int i = 0; i < big.length; i++) big[i] = (byte) mix(i);
        for (int i = 0; i < big.length; i += 13) hash = hash * 31 + big[i];
        System.out.println("threads: " + total.get() + ", list: " + length + ", hash: " + Long.toHexString(hash));
    }
}
