static int64_t floor_shift(int64_t value, int shift) {
    /* A right shift of a negative number is the compiler's choice in C99; this is the floor. */
    return value >= 0 ? value >> shift : -((-value + ((int64_t)1 << shift) - 1) >> shift);
}
static int8_t requantized(int64_t value, int shift, int zero) {
    int64_t half = shift ? (int64_t)1 << (shift - 1) : 0;
    int64_t code = floor_shift(value + half, shift) + zero;
    return (int8_t)(code > 127 ? 127 : code < -128 ? -128 : code);
}
static int32_t saturated(int64_t value) {
    return (int32_t)(value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : value);
}
static void convolve(const int8_t *in, int8_t *out, const int8_t *weight, const int32_t *bias,
                     const int32_t *multiplier, const uint8_t *shift, int zero_in, int zero_out,
                     int channels, int height, int width, int filters, int rows, int columns,
                     int stride_y, int stride_x, int pad_y, int pad_x, int dilation_y,
                     int dilation_x, int groups, int out_height, int out_width) {
    int group_channels = channels / groups, group_filters = filters / groups;
    for (int f = 0; f < filters; f++)
        for (int y = 0; y < out_height; y++)
            for (int x = 0; x < out_width; x++) {
                int64_t sum = bias[f];
                for (int c = 0; c < group_channels; c++) {
                    int channel = f / group_filters * group_channels + c;
                    const int8_t *plane = in + channel * height * width;
                    const int8_t *kernel =
                        weight + ((int64_t)f * group_channels + c) * rows * columns;
                    for (int i = 0; i < rows; i++)
                        for (int j = 0; j < columns; j++) {
                            int v = y * stride_y + i * dilation_y - pad_y;
                            int u = x * stride_x + j * dilation_x - pad_x;
                            int inside = v >= 0 && v < height && u >= 0 && u < width;
                            sum += (int32_t)kernel[i * columns + j] *
                                   (inside ? plane[v * width + u] : zero_in);
                        }
                }
                out[(f * out_height + y) * out_width + x] =
                    requantized((int64_t)saturated(sum) * multiplier[f], shift[f], zero_out);
            }
}
static void multiply(const int8_t *in, int8_t *out, const int8_t *weight, const int32_t *bias,
                     const int32_t *multiplier, const uint8_t *shift, int zero_out, int rows,
                     int inputs, int outputs) {
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) {
            int64_t sum = bias[o];
            for (int i = 0; i < inputs; i++)
                sum += (int32_t)weight[(int64_t)o * inputs + i] * in[(int64_t)r * inputs + i];
            out[(int64_t)r * outputs + o] =
                requantized((int64_t)saturated(sum) * multiplier[o], shift[o], zero_out);
        }
}
static void pool(const int8_t *in, int8_t *out, int channels, int height, int width, int rows,
                 int columns, int stride_y, int stride_x, int pad_y, int pad_x, int out_height,
                 int out_width, int is_maximum, int zero) {
    int32_t count = rows * columns;
    for (int c = 0; c < channels; c++)
        for (int y = 0; y < out_height; y++)
            for (int x = 0; x < out_width; x++) {
                int32_t maximum = -128, total = 0;
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < columns; j++) {
                        int v = y * stride_y + i - pad_y, u = x * stride_x + j - pad_x;
                        int inside = v >= 0 && v < height && u >= 0 && u < width;
                        int value = inside ? in[(c * height + v) * width + u] : zero;
                        total += value;
                        if (inside && value > maximum) maximum = value;
                    }
                int32_t dividend = 2 * total + count, divisor = 2 * count;
                int32_t mean = dividend >= 0 ? dividend / divisor
                                             : -((-dividend + divisor - 1) / divisor);
                out[(c * out_height + y) * out_width + x] = (int8_t)(is_maximum ? maximum : mean);
            }
}
