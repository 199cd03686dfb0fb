// x
char LICENSE[] __attribute__((section("license"))) = "Dual BSD/GPL";
