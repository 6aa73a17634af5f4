// Chances of tokens, in double precision. Included inside namespace OMNI_NS, after simd.h.
// Vectors of eight whatever the instruction set, and so are the sums: in one order.
typedef double vd __attribute__((vector_size(64)));
typedef int64_t vl __attribute__((vector_size(64)));
typedef double vd_any __attribute__((vector_size(64), aligned(8), may_alias));
typedef float vf8_any __attribute__((vector_size(32), aligned(4), may_alias));

// e^x of x <= 0: 2^n by exponent bits, the rest by its Taylor polynomial of degree 13 (error about 1 ulp). 0 below -708.
INLINE vd vexp(vd x) {
    constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: its last bits take whole numbers
    const vd low = vd{} - 708.0, y = x < low ? low : x;
    const vd shifted = y * 1.4426950408889634 + MAGIC, n = shifted - MAGIC;
    const vd r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    vd p = vd{} + 1.6059043836821613e-10;
    p = p * r + 2.0876756987868099e-09;
    p = p * r + 2.5052108385441719e-08;
    p = p * r + 2.7557319223985891e-07;
    p = p * r + 2.7557319223985893e-06;
    p = p * r + 2.4801587301587302e-05;
    p = p * r + 1.9841269841269841e-04;
    p = p * r + 1.3888888888888889e-03;
    p = p * r + 8.3333333333333333e-03;
    p = p * r + 4.1666666666666667e-02;
    p = p * r + 1.6666666666666667e-01;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const vd magic = vd{} + MAGIC, scaled = (vd)((vl)p + (((vl)shifted - (vl)magic) << 52));
    return x < low ? vd{} : scaled;
}

// p[i] = e^((x[i] - most) / temperature), up to a whole block of CHANCES with zeros; a sum for each block.
static void chances(const float* x, int64_t n, double most, double temperature, double* p, double* sums) {
    for (int64_t block = 0; block < n; block += CHANCES) {
        vd sum{};
        for (int64_t i = block; i < block + CHANCES; i += 8) {
            float lane[8];
            for (int64_t j = 0; j < 8 && i + 8 > n; j++) lane[j] = i + j < n ? x[i + j] : -__builtin_inff();
            const auto eight = *reinterpret_cast<const vf8_any*>(i + 8 > n ? lane : x + i);
            const vd here = vexp((__builtin_convertvector(eight, vd) - most) / temperature);
            *reinterpret_cast<vd_any*>(p + i) = here;
            sum += here;
        }
        sums[block / CHANCES] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    }
}
